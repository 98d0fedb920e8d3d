"""Takes a Program. Returns the graph run op by op by torch, the one that every other candidate has to beat.
Next: nothing; it is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.torch_version import torch_version


class Eager:
    """The program as torch runs it. No artifact."""

    name = "eager"
    bakes_constants = False
    raises_on_indices = True

    def availability(self) -> Availability:
        return Availability(True, version=torch_version())

    def options_in_key(self) -> Mapping[str, object]:
        return {}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        return {}

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        return program.run_eagerly


CANDIDATES = (Eager(),)
