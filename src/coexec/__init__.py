"""coexec: run any PyTorch program as it was written, at the speed of one compiled graph."""

from coexec.api import CoExecModule, CoExecutable, compile, materialize, reset, step

__all__ = ["CoExecModule", "CoExecutable", "compile", "materialize", "reset", "step"]
__version__ = "0.1.0"
