"""The protocol of a candidate backend: detect cheaply, build in a child process, load without compiling.

A candidate is asked for nothing but one graph at a time. It never falls back to another backend on its own: what it
cannot do is a :class:`CandidateError`, and the graph stays eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from coexec.backends.candidates.program import Program
from coexec.errors import MachineError

Runner = Callable[..., tuple[Any, ...]]
"""Takes a program's inputs in order; returns its outputs with eager's dtypes, sizes and strides."""


class CandidateError(MachineError, RuntimeError):
    """This candidate cannot build, load or run this program. `reason` is one line for people."""

    def __init__(self, candidate: str, reason: str) -> None:
        super().__init__(f"{candidate}: {reason}")
        self.candidate, self.reason = candidate, reason

    def __reduce__(self) -> tuple[type[CandidateError], tuple[str, str]]:
        return CandidateError, (self.candidate, self.reason)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a candidate can be used beside the torch of this process."""

    usable: bool
    reason: str = ""  # why not, and what to do about it
    version: str = ""  # of the backend's own package; torch's for what torch brings
    works_with: str = ""  # versions that would work, when this one does not


@runtime_checkable
class Candidate(Protocol):
    """One backend, or one setting of a backend."""

    @property
    def name(self) -> str:
        """For example "onnxruntime" or "inductor-freezing": letters, digits and dashes; stored in decisions."""

    @property
    def bakes_constants(self) -> bool:
        """The artifact's files hold values of static inputs: they are keyed by the values' digest too.

        See also :func:`captures_constants`.
        """

    def availability(self) -> Availability:
        """Cheap: looks at installed metadata, imports nothing heavy."""

    def options_in_key(self) -> Mapping[str, object]:
        """Plain JSON: whatever changes the artifact (package version, opset, flags)."""

    def build(self, program: Program, folder: Path, *, threads: int, budget_s: float) -> Mapping[str, object]:
        """Compile into files of `folder` (exists, empty; flat names, no pickle); return plain JSON metadata.

        Called in a child process of the tuner. `threads` is what will serve; `budget_s` (seconds) bounds a search,
        not a compilation. Errors: CandidateError with the reason; anything else is counted as an error of the backend.
        """

    def load(self, folder: Path, metadata: Mapping[str, object], program: Program, *, threads: int) -> Runner:
        """The artifact of `folder` (read-only files) as a callable, in any process, without compiling.

        Static inputs are taken from `program.inputs` now, zero copy where the runtime allows; the callable still
        takes them by position and ignores their values. Errors: CandidateError.
        """


def captures_constants(candidate: Candidate) -> bool:
    """Whether a loaded callable has copied or prepacked static inputs, so that a later change of them goes unseen.

    A candidate says so by an attribute of this name (default: what `bakes_constants` says). Whoever serves it watches
    the version counters and the identity of the static inputs; only with `bakes_constants` the stored files depend on
    them as well.
    """
    return bool(getattr(candidate, "captures_constants", candidate.bakes_constants))


def binds_static(candidate: Candidate) -> bool:
    """Whether a loaded callable keeps the static inputs it was loaded with. The others take them anew at each call.

    A candidate says so by an attribute of this name (default: it does).
    """
    return bool(getattr(candidate, "binds_static", True))


def raises_on_indices(candidate: Candidate) -> bool:
    """Whether a loaded callable raises for every index that eager raises for: it runs torch's own kernels.

    A candidate says so by an attribute of this name (default: it does not, and whoever serves it looks at indices
    before each call). A compiled loop may wrap an index, clamp it, read other memory, or end the process.
    """
    return bool(getattr(candidate, "raises_on_indices", False))
