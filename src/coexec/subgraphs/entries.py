"""What the store keeps, as frozen data. Times of day are seconds since the epoch (`_s` of durations: seconds)."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coexec.subgraphs.trust import statement_bytes

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Outcome(enum.StrEnum):
    """How a candidate ended."""

    OK = "ok"  # right answers, timed
    WRONG = "wrong"  # further from float64 than the rule allows
    ERROR = "error"  # raised while compiling or running
    CRASH = "crash"  # its process died (signal)
    TIMEOUT = "timeout"
    MEMORY = "memory"  # over its memory limit
    UNAVAILABLE = "unavailable"  # not installed, or not for this kind of graph


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One file of a decision."""

    name: str  # file name a backend expects ("model.so", "model.bin"): letters, digits, "._+-", no folders
    digest: str  # SHA-256 of the content
    size_bytes: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"artifact name {self.name!r}: use letters, digits, and ._+- only, at most 100")
        if not is_digest(self.digest):
            raise ValueError(f"artifact digest {self.digest!r}: expected 64 hex digits")


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen backend of one subgraph in one environment, with what is needed to run it."""

    subgraph: str  # SubgraphKey.digest
    environment: str  # Environment.digest
    backend: str  # name of a backend, "eager" included
    shape_class: str = ""  # SubgraphKey.shape_class
    constants: str = ""  # constants_digest of the weights baked into the artifacts, "" if none are
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON: the recipe to rebuild the artifacts
    artifacts: tuple[ArtifactRef, ...] = ()  # empty: rebuild from `options` (or nothing to load)
    speedup: float | None = None  # eager's (of a segment: the usual library's) median over this backend's, as measured
    reason: str = ""  # one line for people: why this backend
    decided_s: float = 0.0  # time of day

    def statement(self) -> dict[str, object]:
        """What a signature and the checksum cover: every field."""
        refs = [[ref.name, ref.digest, ref.size_bytes] for ref in self.artifacts]
        return {
            "kind": "decision",
            **{
                name: getattr(self, name) for name in ("subgraph", "environment", "shape_class", "constants", "backend")
            },
            "options": canonical_json(self.options),
            "artifacts": refs,
            "speedup": self.speedup,
            "reason": self.reason,
            "decided_s": self.decided_s,
        }

    def recipe(self) -> Decision:
        """The same choice without its files and without a claim about weights: they are to be built anew."""
        return replace(self, constants="", artifacts=())

    def checksum(self) -> str:
        """SHA-256 of the statement: SQLite does not notice a flipped bit, this does."""
        return hashlib.sha256(statement_bytes(self.statement())).hexdigest()


def program_statement(subgraph: str, program: str) -> dict[str, object]:
    """What a signature of a stored program covers: another graph's program would be tuned in its place otherwise."""
    return {"kind": "program", "subgraph": subgraph, "program": program}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One attempt of one candidate. Information, not authority: in a shared store anybody may have written it."""

    subgraph: str
    environment: str
    backend: str
    outcome: Outcome
    shape_class: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # plain JSON
    detail: str = ""  # error text, or what the verification saw
    median_s: float | None = None  # per call; None unless OK
    spread_s: float | None = None  # interquartile range
    samples: int = 0
    eager_s: float | None = None  # eager's (of a segment: the usual library's) median in the same session
    compile_s: float | None = None
    measured_s: float = 0.0  # time of day
    id: str = ""  # unique; the store gives one to an empty id, an import keeps it


@dataclass(frozen=True, slots=True)
class SubgraphInfo:
    """One stored subgraph, as `db list` and `db show` print it and as the tuner picks it."""

    digest: str
    n_ops: int
    note: str  # where it was seen first: "model.py:31", "train_step, train.py:12: segment of 65 ops"
    program: str  # digest of the serialized program in the artifacts, "" if none was stored
    created_s: float
    used_s: float  # day-exact: last lookup or store
    text: str = field(repr=False)
    run_s: float | None = None  # of one run where it serves, as measured last; None if nobody has told
    runs: int = 0  # that were told, of all processes


def canonical_json(value: object) -> str:
    """JSON with sorted keys. Errors: ValueError (or TypeError) for what JSON cannot say, nan included."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hex digits, and so is safe as a file name."""
    return bool(_DIGEST.fullmatch(text))
