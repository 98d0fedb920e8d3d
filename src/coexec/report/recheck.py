"""`coexec recheck` as a library: do the decisions of this environment hold? Each is loaded, verified and timed anew.

The stored artifact runs, not a new one: what a serving process would run. Nothing in the store is changed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coexec.config import private_cache_dir
from coexec.subgraphs.entries import Decision, Outcome, SubgraphInfo
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.store import Store
from coexec.tuning.child import Child, ChildError
from coexec.tuning.identity import custom_ops_of_text, environment_of
from coexec.tuning.machine_load import ForeignLoad
from coexec.tuning.markers import Markers
from coexec.tuning.nursery import Nursery
from coexec.tuning.roster import Roster
from coexec.tuning.timing import EAGER, EagerSide, Turn, paused
from coexec.tuning.turns import Timing, time_by_turns

MEMORY_BYTES = 16 << 30

WIDE = 1.5
"""Upper by lower end of an interval: beyond it a ratio is a guess."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """One decision, looked at again."""

    subgraph: str
    note: str
    backend: str
    decided: float | None  # speedup over eager when it was decided
    outcome: Outcome
    detail: str  # why it failed; "" if it was timed
    timing: Timing | None  # None unless OK
    busy_cores: float = 0.0  # that others took during the timing

    @property
    def wide(self) -> bool:
        """The interval is too wide for its middle to mean anything."""
        return self.timing is not None and self.timing.high > WIDE * self.timing.low

    @property
    def holds(self) -> bool:
        """It runs, is right, and is not slower than eager for sure."""
        return self.outcome is Outcome.OK and (self.timing is None or self.timing.high >= 1.0)


class _FailedError(Exception):
    """This decision cannot be timed."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


def recheck(
    store: Store,
    *,
    subgraphs: Sequence[str] = (),
    threads: int | None = None,
    rounds: tuple[int, int] = (9, 27),
    timeout_s: float = 240.0,
    listener: Callable[[Decision, int], None] = lambda decision, total: None,
) -> tuple[Recheck, ...]:
    """Time every decision of this environment that does not name eager.

    Args:
        store: a strict one.
        subgraphs: beginnings of digests; none means all.
        threads: intra-op threads; None: torch's here. Decisions belong to a thread count.
        rounds: fewest and most rounds of a timing.
        timeout_s: for each question to a process.
        listener: hears each decision before it is timed, and how many there are.

    Errors: StoreError.
    """
    serving = threads or torch.get_num_threads()
    decided = list(_decided(store, subgraphs, serving))
    markers = Markers(private_cache_dir("tuning") / "bench")
    with contextlib.closing(Nursery(serving)) as nursery:
        bench = _Bench(store, Roster(markers, nursery, MEMORY_BYTES), serving, rounds, timeout_s)
        return tuple(bench.look_at(info, decision, listener, len(decided)) for info, decision in decided)


def _decided(store: Store, prefixes: Sequence[str], threads: int) -> Iterator[tuple[SubgraphInfo, Decision]]:
    """Per subgraph and class of sizes the newest decision of this environment for a backend other than eager."""
    for info in store.subgraphs():
        if prefixes and not any(info.digest.startswith(prefix) for prefix in prefixes):
            continue
        with contextlib.suppress(UnkeyableGraphError):  # its custom ops are not loaded here: no decision is for here
            environment = environment_of(custom_ops_of_text(info.text), threads)
            here = [d for d in store.decisions(info.digest) if d.environment == environment.digest]
            for decision in _newest(here):
                if decision.backend != EAGER:
                    yield info, decision


def _newest(decisions: Iterable[Decision]) -> Iterable[Decision]:
    """One per class of sizes; of two made together (for these weights, for any) the one for these weights."""
    ordered = sorted(decisions, key=lambda decision: (bool(decision.constants), decision.decided_s))
    return {decision.shape_class: decision for decision in ordered}.values()


@dataclass(frozen=True, slots=True)
class _Bench:
    """What each timing needs."""

    store: Store
    roster: Roster
    threads: int
    rounds: tuple[int, int]
    timeout_s: float

    def look_at(
        self, info: SubgraphInfo, decision: Decision, listener: Callable[[Decision, int], None], total: int
    ) -> Recheck:
        """One decision. Errors: StoreError."""
        listener(decision, total)
        outcome, detail, timing = Outcome.OK, "", None
        others = ForeignLoad()
        try:
            timing = self.timed(decision)
        except _FailedError as failure:
            outcome, detail = failure.outcome, failure.detail
        except ChildError as failure:
            outcome, detail = failure.outcome, failure.reason
        return Recheck(
            info.digest, info.note, decision.backend, decision.speedup, outcome, detail, timing, others.cores()
        )

    def timed(self, decision: Decision) -> Timing:
        """Loaded, verified, timed. Errors: _FailedError, ChildError, StoreError."""
        program = self.store.program(decision.subgraph)
        if program is None:
            raise _FailedError(Outcome.UNAVAILABLE, "its program was pruned; there is nothing to time it with")
        with contextlib.ExitStack() as stack:
            folder = self._folder(stack, decision)
            eager = EagerSide(self.roster, program, self.threads, self.timeout_s)
            stack.callback(eager.close)
            child = stack.enter_context(self.roster.child(decision.backend))
            self._load(child, decision, program, folder)
            report = self._asked(child, {"do": "verify"})
            if not report["accepted"]:
                raise _FailedError(Outcome.WRONG, "; ".join(report["problems"][:3]))
            return self._by_turns(child, self._eager_child(eager))

    def _folder(self, stack: contextlib.ExitStack, decision: Decision) -> Path:
        if not decision.artifacts:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=private_cache_dir("tuning"))))
        folder = self.store.checkout(decision)
        assert folder is not None, "a strict store raises instead"
        return folder

    def _load(self, child: Child, decision: Decision, program: Path, folder: Path) -> None:
        question = {"do": "load", "program": str(program), "candidate": decision.backend, "folder": str(folder)}
        metadata = dict(decision.options.get("metadata", {}))
        self._asked(child, {**question, "metadata": metadata, "threads": self.threads})

    def _eager_child(self, eager: EagerSide) -> Child:
        try:
            return eager.child()
        except RuntimeError as error:
            raise _FailedError(Outcome.ERROR, str(error)) from error

    def _asked(self, child: Child, question: dict[str, Any]) -> dict[str, Any]:
        answer = child.ask(question, timeout_s=self.timeout_s)
        if not answer["ok"]:
            raise _FailedError(Outcome.ERROR, f"{question['do']}: {answer['reason']}")
        return answer

    def _by_turns(self, child: Child, other: Child) -> Timing:
        with self.roster.quiet(child, other), paused(child), paused(other):
            return time_by_turns(Turn(other, self.timeout_s), Turn(child, self.timeout_s), rounds=self.rounds)
