"""Takes stored programs, candidate backends and a budget of seconds.
Returns measurements, and per graph and environment the decision: the fastest candidate that gives the right answer.
Next: choose (looks decisions up and installs them); the command line shows the report.
"""

from coexec.tuning.report import AttemptReport, GraphReport, Progress, TuneReport
from coexec.tuning.settings import TuneSettings
from coexec.tuning.tuner import tune

__all__ = ["AttemptReport", "GraphReport", "Progress", "TuneReport", "TuneSettings", "tune"]
