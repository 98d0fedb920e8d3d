"""coexec: run any PyTorch program as it was written, at the speed of one compiled graph."""

from coexec.api import CoExecModule, CoExecutable, compile, materialize, reset, step
from coexec.intercept.native import install_wrappers

__all__ = ["CoExecModule", "CoExecutable", "compile", "materialize", "reset", "step"]
__version__ = "0.1.0"

# Now, not when the first step runs: programs capture functions (`from torch import tensor`) right after their imports.
install_wrappers()
