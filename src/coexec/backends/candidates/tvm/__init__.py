"""Takes a Program. Returns it compiled by TVM (Relax), with its default schedules or with ones found by MetaSchedule.
Next: heavy.py converts, compiles and loads; schedules.py searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coexec.backends.candidates.candidate import Availability, Runner
from coexec.backends.candidates.installed import needs, version_of
from coexec.backends.candidates.program import Program

FFI = "0.1.14.post1"
"""The newer apache-tvm-ffi that pip picks by itself crashes the process when a search starts (seen: 0.1.15.post2)."""


@dataclass(frozen=True, slots=True)
class Tvm:
    """`tuned`: the search takes the whole budget of the build, and its schedules are stored with the library."""

    name: str
    tuned: bool
    bakes_constants: bool = False

    def availability(self) -> Availability:
        tuner = {"cloudpickle": "", "psutil": ""} if self.tuned else {}  # its worker processes need them
        return needs({"apache-tvm": "", "apache-tvm-ffi": FFI, **tuner}, extra="tvm")

    def options_in_key(self) -> Mapping[str, object]:
        return {"version": version_of("apache-tvm")}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        from coexec.backends.candidates.tvm.heavy import build

        return build(self.name, program, folder, threads=threads, search_s=budget_s if self.tuned else 0.0)

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        from coexec.backends.candidates.tvm.heavy import load

        return load(self.name, program, folder, threads=threads)


CANDIDATES = (Tvm("tvm", tuned=False), Tvm("tvm-metaschedule", tuned=True))
