"""Variants of a segment's library with a planted behaviour, registered as another package would register its own.

Their segment is :func:`climbing_back`: `x` plus one, by a long way round. Most of them compile nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coexec.backends import variants
from coexec.backends.candidates.candidate import Availability, CandidateError
from coexec.backends.segment_program import SegmentProgram

PREFIX = f"{variants.USUAL}-planted-"
ROUNDS = 30
GARBAGE = b"no machine code"
BEHAVIOURS = ("faster", "slower", "wrong", "crash", "refuses", "absent", "compiled")


def climbing_back(x: torch.Tensor) -> torch.Tensor:
    """`x` plus one: milliseconds as it stands, microseconds for who knows."""
    y = x
    for _ in range(ROUNDS):
        y = y.exp().log()
    return y + 1.0


@dataclass(frozen=True)
class Planted:
    """The usual results, but for one behaviour."""

    behaviour: str
    bakes_constants: bool = False

    @property
    def name(self) -> str:
        return PREFIX + self.behaviour

    def availability(self) -> Availability:
        return Availability(self.behaviour != "absent", reason="not for this machine")

    def options_in_key(self) -> Mapping[str, object]:
        return {"version": os.environ.get("PLANTED_VERSION", "1")}

    def build(self, program: SegmentProgram, folder: Path) -> Mapping[str, Any]:
        """Garbage, which the tuner never loads because `load` does not; "compiled" makes a real library."""
        if self.behaviour == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.behaviour == "refuses":
            raise CandidateError(self.name, "this op is beyond me")
        if self.behaviour == "compiled":
            return variants.Compiled(self.name, settings={"realize_cpu_opcount_threshold": 20}).build(program, folder)
        (folder / variants.LIBRARY).write_bytes(GARBAGE)
        return {"verified": False}

    def load(self, program: SegmentProgram, number: int, folder: Path) -> variants.Run:
        assert (folder / variants.LIBRARY).exists()
        replay = variants.Replay().load(program, number, folder)
        runs: dict[str, variants.Run] = {
            "wrong": lambda inputs: [output * 1.001 for output in replay(inputs)],
            "slower": lambda inputs: (replay(inputs), replay(inputs))[0],
        }
        return runs.get(self.behaviour, _knowing)


def _knowing(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0] + 1.0]


def planted() -> list[Planted]:
    """The entry point."""
    return [Planted(behaviour) for behaviour in BEHAVIOURS]


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Inside the block this process and the tuner's children find them: a distribution in `folder`, on the path."""
    shutil.copyfile(__file__, folder / "planted_variants.py")
    information = folder / "planted_variants-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-variants\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{variants.ENTRY_POINTS}]\nplanted = planted_variants:planted\n")
    sys.path.insert(0, str(folder))
    variants._registered.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        variants._registered.cache_clear()
