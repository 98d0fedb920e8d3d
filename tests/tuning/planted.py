"""Candidates with a planted behaviour, registered as another package would register its own.

`install` writes this module and its entry points into a folder; with the folder on the path, this process and the
tuner's children find the candidates. Their program is :func:`climbing`: `x` plus one, many times.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.candidate import Availability, CandidateError
from coexec.backends.candidates.program import Program

STEPS = 60
MORTAL_CALLS = 20


@dataclass(frozen=True)
class Planted:
    """Eager, but for one behaviour."""

    name: str
    bakes_constants: bool = False
    version: str = "1"

    @property
    def captures_constants(self) -> bool:
        """Values are copied when it is loaded ("planted-bound"), or when it is built."""
        return self.bakes_constants or self.name == "planted-bound"

    def availability(self) -> Availability:
        if self.name == "planted-absent":
            return Availability(False, reason="it is not installed", works_with="anything else")
        return Availability(True, version=self.version)

    def options_in_key(self) -> Mapping[str, object]:
        return {"version": self.version}

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        (folder / "data.json").write_text(json.dumps({"steps": STEPS, "threads": threads}))
        if self.name == "planted-refuses":
            raise CandidateError(self.name, "this op is beyond me")
        if self.name == "planted-raises":
            raise ZeroDivisionError("in the middle of a build")
        if self.name == "planted-segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.name == "planted-slow-build":
            time.sleep(float(os.environ.get("PLANTED_BUILD_S", "0.5")))
        return {"made_by": self.name}

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Any:
        assert metadata["made_by"] == self.name
        steps = json.loads((folder / "data.json").read_text())["steps"]
        if self.name == "planted-hang":
            time.sleep(3600)
        return getattr(Runs(program, steps), self.name.removeprefix("planted-").replace("-", "_"), program.run_eagerly)


class Runs:
    """What the candidates return from `load`."""

    def __init__(self, program: Program, steps: int) -> None:
        self.program, self.steps, self.kept = program, steps, []
        self.numbers = [value for value in program.inputs if isinstance(value, int)]
        self.weights = [program.inputs[position].clone() for position in program.static_inputs]

    def fast(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + self.steps,)

    slow_build = fast

    def baked(self, *inputs: Any) -> tuple[torch.Tensor]:
        (x,) = (value for i, value in enumerate(inputs) if i not in self.program.static_inputs)
        return (x + self.steps * self.weights[0],)

    bound = baked

    def sleeper(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Right in the tuner's children, wrong where it serves."""
        return (x + self.steps + float("PLANTED_AWAKE" in os.environ),)

    def slow(self, *inputs: Any) -> tuple[Any, ...]:
        self.program.run_eagerly(*inputs)
        return self.program.run_eagerly(*inputs)

    def wrong(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(value * 1.001 for value in self.program.run_eagerly(*inputs))

    def wrong_later(self, *inputs: Any) -> tuple[Any, ...]:
        self.kept.append(None)
        returned = self.program.run_eagerly(*inputs)
        return returned if len(self.kept) == 1 else tuple(value + 1 for value in returned)

    def reuses_memory(self, *inputs: Any) -> tuple[Any, ...]:
        returned = self.program.run_eagerly(*inputs)
        self.kept = self.kept or list(returned)
        self.kept[0].copy_(returned[0])
        return tuple(self.kept)

    def writes_input(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        returned = self.program.run_eagerly(x)
        x.zero_()
        return returned

    def transposed(self, *inputs: Any) -> tuple[Any, ...]:
        return tuple(value.t().contiguous().t() for value in self.program.run_eagerly(*inputs))

    def draws(self, *inputs: Any) -> tuple[Any, ...]:
        torch.rand(1)
        return self.program.run_eagerly(*inputs)

    def rigid(self, *inputs: Any) -> tuple[Any, ...]:
        """Right at the sizes it was loaded for, wrong at others."""
        returned = self.program.run_eagerly(*inputs)
        return returned if list(inputs[:-1]) == self.numbers else tuple(value + 1 for value in returned)

    def picky(self, *inputs: Any) -> tuple[Any, ...]:
        """Refuses inputs that are not all positive."""
        if bool((inputs[0] < 0).any()):
            raise ValueError("I do not like these inputs")
        return self.fast(*inputs)

    def wraps(self, *inputs: Any) -> tuple[Any, ...]:
        """Takes an element for every index, as a runtime without checks does."""
        wrapped = [v % STEPS if isinstance(v, torch.Tensor) and v.dtype == torch.int64 else v for v in inputs]
        return self.program.run_eagerly(*wrapped)

    def mortal(self, *inputs: Any) -> tuple[Any, ...]:
        """Lives long enough to be verified."""
        self.kept.append(None)
        if len(self.kept) > MORTAL_CALLS:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.program.run_eagerly(*inputs)

    def leak(self, *inputs: Any) -> tuple[Any, ...]:
        while True:
            self.kept.append(torch.ones(8 << 20))  # 32 MiB, touched


BEHAVIOURS = (
    "fast", "slow", "wrong", "wrong-later", "reuses-memory", "writes-input", "transposed", "draws", "leak", "hang",
    "segfault", "raises", "refuses", "absent", "slow-build",
)  # fmt: skip


def candidates() -> list[Planted]:
    """The entry point; PLANTED narrows it down, PLANTED_VERSION is the version of all of them."""
    wanted = os.environ.get("PLANTED", "").split() or [
        *BEHAVIOURS,
        "baked",
        "bound",
        "sleeper",
        "rigid",
        "picky",
        "wraps",
        "mortal",
    ]
    version = os.environ.get("PLANTED_VERSION", "1")
    return [Planted(f"planted-{name}", name == "baked", version) for name in wanted]


def install(folder: Path) -> None:
    """Write the distribution `planted` into `folder`."""
    shutil.copyfile(__file__, folder / "planted_candidates.py")
    information = folder / "planted-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[coexec.backends]\nplanted = planted_candidates:candidates\n")
