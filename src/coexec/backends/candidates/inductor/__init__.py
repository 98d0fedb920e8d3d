"""Takes a Program. Returns it compiled by TorchInductor, stored as shared libraries, or as its wrapper and kernels.
Next: compiled.py compiles; aot.py and jit.py store and load.

A frozen graph keeps prepacked weights as opaque constants, which only the ahead-of-time form can store: so the frozen
candidates are AOTInductor libraries, and the others come in both forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.program import Program
from coexec.backends.candidates.torch_version import torch_version


@dataclass(frozen=True, slots=True)
class Inductor:
    """One setting of the compiler. `frozen` libraries hold prepacked weights; the others take weights per call."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of torch._inductor.config
    frozen: bool = False
    ahead_of_time: bool = False

    @property
    def bakes_constants(self) -> bool:
        return self.frozen

    @property
    def binds_static(self) -> bool:
        """The others take weights like any input."""
        return self.frozen

    def availability(self) -> Availability:
        return Availability(True, version=torch_version())

    def options_in_key(self) -> Mapping[str, object]:
        return dict(self.options)

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        from coexec.backends.candidates.inductor import aot, jit

        if self.ahead_of_time:
            return aot.build(self.name, program, folder, self.options, threads=threads, frozen=self.frozen)
        return jit.build(self.name, program, folder, self.options, threads=threads)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        from coexec.backends.candidates.inductor import aot, jit

        if self.ahead_of_time:
            return aot.load(self.name, program, folder, frozen=self.frozen)
        return jit.load(self.name, program, folder, metadata)


TUNED = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}

CANDIDATES = (
    Inductor("inductor"),
    Inductor("inductor-cpp-wrapper", {"cpp_wrapper": True}),
    Inductor("inductor-freezing", {"freezing": True}, frozen=True, ahead_of_time=True),
    Inductor("inductor-max-autotune", TUNED, frozen=True, ahead_of_time=True),
    Inductor("aotinductor", ahead_of_time=True),
)
