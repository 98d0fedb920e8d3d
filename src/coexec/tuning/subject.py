"""What a child of the tuner works on: a stored graph or a segment of co-execution, by the file that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Subject(Protocol):
    """A program with its inputs, and the candidate that was loaded for it."""

    def describe(self) -> dict[str, Any]:
        """What decisions about it are keyed by, besides its graph."""

    def build(self, candidate: str, folder: Path, threads: int, budget_s: float) -> Mapping[str, Any]:
        """Compile into files of `folder`; return what loading needs besides them. Errors: CandidateError; any other."""

    def load(self, candidate: str, folder: Path, metadata: Mapping[str, Any], threads: int) -> dict[str, Any]:
        """Load from files, as whoever serves it will; return facts for timing. Errors: as `build`."""

    def verify(self) -> dict[str, Any]:
        """Compare what is loaded with the ops as recorded: {"accepted", "problems", "worst", "wide": in float64}."""

    def begin(self) -> None:
        """Before the calls that are timed: inputs as recorded."""

    def call(self) -> None:
        """One call of what is loaded."""


def open_subject(path: Path) -> Subject:
    """The program in `path`. Errors: ProgramError; OSError."""
    from coexec.backends.segment_program import is_segment_program, read_program

    if is_segment_program(path):
        from coexec.tuning.segment_subject import SegmentSubject

        return SegmentSubject(read_program(path))
    from coexec.tuning.graph_subject import GraphSubject
    from coexec.tuning.program_file import load_program

    return GraphSubject(load_program(path))
