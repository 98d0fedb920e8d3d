"""A segment of the plan and the compiled versions of it, one per set of shapes or one for many sizes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coexec.backends.symbolic import SymbolicSpec
from coexec.plan.segments import Segment
from coexec.runtime.benefit import quartile
from coexec.runtime.spec_builder import BuiltSegment

MAX_SPECIALISED = 4
"""Versions of one segment for one set of shapes each."""

WORTH_PASSES = 8
"""A further set of shapes gets a version of its own once Python has passed through the segment with it so often."""

MAX_DESCRIBED = 6
"""Sets of shapes of one segment that are looked at in order to find what varies."""

KEY_DIGITS = 16
"""Of a key, as `coexec db list` prints them."""

_PURPOSE = {
    "functional": "values only",
    "commit": "writing parameters and other memory of yours",
    "python": "run by Python",
}


class State(enum.Enum):
    """How far a segment, or a version of it, is."""

    OBSERVED = "replay: observing what outlives it"
    DESCRIBED = "replay: waiting for live inputs"
    COMPILING = "replay: compiling in the background"
    COMPILED = "inductor"
    REPLAY = "replay"  # for good; `reason` says why


@dataclass(slots=True, eq=False)
class Version:
    """One artifact of a segment, or the way to it."""

    built: BuiltSegment  # a pass that it is for
    native: Any  # csrc Segment
    signature: int  # of the shapes that it is for; 0: for many
    symbolic: SymbolicSpec | None = None
    state: State = State.DESCRIBED
    reason: str = ""
    job: int = -1
    key: str = ""  # of its artifact, in the cache and in the database
    noted_runs: int = 0  # of which the database knows
    tuned: str = ""  # what the offline tuner has found for it, in words; "" if it has not tried

    @property
    def spec(self) -> Any:
        """What is compiled."""
        return self.symbolic or self.built.spec

    def run_s(self) -> float | None:
        """Seconds of one compiled run in this step, as its trial found; None before that is over."""
        native = self.native
        return quartile(native.compiled_s) if native.compiled_s and not native.trial else None

    def describe(self) -> str:
        """What it is, its executor, and why."""
        native = self.native
        text = f"{self._shapes()}: {self.state.value}"
        text += f" ({self.reason})" if self.reason else ""
        text += f" (tuned: {self.tuned})" if self.tuned and self.state is State.COMPILED else ""
        text += f", {native.runs} compiled runs" if native.runs else ""
        if self.state is State.COMPILED and (compiled_s := self.run_s()) is not None:
            replayed_s = quartile(native.replayed_s)
            text += f" ({compiled_s * 1e3:.3f} ms; {replayed_s * 1e3:.3f} ms replayed)"
        if self.state is State.COMPILED and self.key:
            text += f", `coexec db show {self.key[:KEY_DIGITS]}`"
        if native.discards:
            text += f", {native.discards} discarded, the last because: {native.last_discard}"
        return text

    def _shapes(self) -> str:
        if self.symbolic is None:
            return "for one set of shapes"
        sizes = (f"{source.dimension} of input {source.input}" for source in self.symbolic.symbols)
        return f"for any size of dimension {', '.join(sizes)}"


@dataclass(slots=True, eq=False)
class ManagedSegment:
    """One segment of the plan."""

    planned: Segment
    nodes: tuple[int, ...]
    native: Any  # csrc PlannedSegment
    fixed: str = ""  # why it stays on replay, if nothing will change that
    passes: int = 0  # of `native.passes`, when observation began
    versions: list[Version] = field(default_factory=list)
    described: dict[int, BuiltSegment] = field(default_factory=dict)  # by signature; while it may be needed
    tries: int = 0  # iterations that were described in search of another set of shapes
    not_lowerable: str = ""  # an op of it that cannot be compiled, until the plan is made anew without it
    not_dynamic: str = ""  # why no version for many sizes is sought any more
    redescribed: int = 0

    @property
    def state(self) -> State:
        """Of the segment as a whole."""
        if self.fixed:
            return State.REPLAY
        states = [version.state for version in self.versions]
        order = (State.COMPILED, State.COMPILING, State.DESCRIBED)
        return next((state for state in order if state in states), State.REPLAY if states else State.OBSERVED)

    @property
    def reason(self) -> str:
        """Why it is replayed."""
        if self.fixed or self.state is not State.REPLAY:
            return self.fixed
        return self.versions[-1].reason if self.versions else ""

    @property
    def dynamic(self) -> Version | None:
        """The version for many sizes, if one was begun."""
        return next((version for version in self.versions if version.symbolic is not None), None)

    def specialised(self) -> list[Version]:
        """Versions for one set of shapes each."""
        return [version for version in self.versions if version.symbolic is None]

    def loaded(self, prefer_dynamic: bool) -> list[Any]:
        """Native versions that may run, the preferred ones first."""
        ready = [version for version in self.versions if version.state is State.COMPILED]
        dynamic = [version for version in ready if version.symbolic is not None]
        if dynamic and prefer_dynamic:
            ready = dynamic
        return [version.native for version in sorted(ready, key=lambda version: version.symbolic is not None)]

    def frequent(self) -> list[int]:
        """Signatures of the most frequent sets of shapes that are worth a version."""
        counted = sorted(self.native.signatures, key=lambda entry: -entry[1])[:MAX_SPECIALISED]
        return [signature for signature, count in counted if count >= WORTH_PASSES]

    def under_way(self) -> Sequence[Version]:
        """Versions that wait for something."""
        return [version for version in self.versions if version.state in (State.DESCRIBED, State.COMPILING)]

    def describe(self) -> list[str]:
        """A line for the segment, and one per version if there are several."""
        head = f"{len(self.nodes)} ops, {_PURPOSE[self.planned.kind]}"
        if not self.versions:
            return [f"{head}: {self.state.value}" + (f" ({self.reason})" if self.reason else "")]
        if len(self.versions) == 1 and len(self.native.signatures) < 2:
            return [f"{head}{self.versions[0].describe().removeprefix('for one set of shapes')}"]
        lines = [f"{head}, {len(self.native.signatures)} sets of shapes: {self.state.value}"]
        lines += [f"  {version.describe()}" for version in self.versions]
        if self.not_dynamic:
            lines.append(f"  no version for many sizes: {self.not_dynamic}")
        return lines
