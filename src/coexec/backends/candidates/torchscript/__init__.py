"""Takes a Program. Returns it traced by TorchScript: plain, optimized for inference, or run by the Static Runtime.
Next: heavy.py traces and loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.torch_version import torch_version


@dataclass(frozen=True, slots=True)
class TorchScript:
    """One way to run a traced graph. The file holds no weights: they are put in at load.

    (`torch.jit.optimize_for_inference` writes files of convolutional nets that lack their weights and cannot be
    loaded; here its input is stored, and it runs at load, in under a tenth of a second.)
    """

    name: str
    captures_constants: bool  # frozen: later changes of weights are not seen
    bakes_constants: bool = False
    raises_on_indices: bool = True  # torch's kernels, in all three
    holds_gil: bool = False  # other Python threads stand still during a call

    def availability(self) -> Availability:
        return Availability(True, version=torch_version())

    def options_in_key(self) -> Mapping[str, object]:
        return {}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        from coexec.backends.candidates.torchscript.heavy import build

        return build(self.name, program, folder)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        from coexec.backends.candidates.torchscript.heavy import load

        return load(self.name, folder, program)


CANDIDATES = (
    TorchScript("torchscript", captures_constants=False),
    TorchScript("optimize-for-inference", captures_constants=True),
    TorchScript("static-runtime", captures_constants=True, holds_gil=True),
)
