"""What a store holds, one table per question: which subgraphs, which backend won each, which ones fail and why."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coexec.subgraphs.entries import Decision, Measurement, Outcome, SubgraphInfo
from coexec.subgraphs.environment import environment_of_text
from coexec.subgraphs.near_miss import Difference, explain_difference
from coexec.subgraphs.store import Store


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """The newest attempt of one backend on one subgraph in one environment and class of sizes."""

    backend: str
    outcome: Outcome
    speedup: float | None  # over eager in the same session; None unless it was timed
    median_s: float | None
    detail: str
    environment: str
    shape_class: str


@dataclass(frozen=True, slots=True)
class SubgraphRow:
    """One subgraph."""

    digest: str
    note: str
    n_ops: int
    used_s: float
    run_s: float | None  # of one run where it serves; None if nobody has told
    runs: int  # that were told
    decisions: tuple[Decision, ...]  # newest first
    attempts: tuple[AttemptRow, ...]  # fastest first, failures last
    passed_over: str  # why the tuner leaves it out here; "" if it does not

    @property
    def was_tuned(self) -> bool:
        """Here or elsewhere. Co-execution's segments have a decision as soon as they are compiled."""
        return any(is_tuned(decision) for decision in self.decisions)


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend over all subgraphs that it was tried on."""

    backend: str
    tried: int
    chosen: int  # pairs of a subgraph and a machine for which it was; one for other weights is no other choice
    outcomes: dict[str, int]
    mean_speedup: float | None  # geometric, of those that were timed
    common_failure: str  # the most frequent error text, "" without failures


@dataclass(frozen=True, slots=True)
class EnvironmentRow:
    """One environment, told by what differs from the newest one."""

    digest: str
    decisions: int
    differences: tuple[Difference, ...]  # empty for the newest


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Everything, as of `made_s` (time of day)."""

    url: str
    made_s: float
    subgraphs: tuple[SubgraphRow, ...]  # last used first
    backends: tuple[BackendRow, ...]  # most chosen first
    environments: tuple[EnvironmentRow, ...]  # most decisions first
    waiting: tuple[str, ...]  # digests of what `coexec tune` would work on here, in its order

    def rows_waiting(self) -> list[SubgraphRow]:
        """What waits, in the tuner's order."""
        rows = {row.digest: row for row in self.subgraphs}
        return [rows[digest] for digest in self.waiting if digest in rows]


def is_tuned(decision: Decision) -> bool:
    """Whether the tuner made it: of a segment the first decision is that it was compiled. One that came without the
    record of what was tried has a speedup, which nobody else measures."""
    return bool(decision.options.get("tried")) or decision.speedup is not None


def tuning_queue(store: Store) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """What `coexec tune` has before it here: digests in its order, and by digest why others are passed over.

    Imports torch, which names this environment, unless nothing is stored that could be tuned.
    """
    if not any(info.program for info in store.subgraphs()):
        return (), {}
    from coexec.tuning.queue import queue_here

    queue = queue_here(store)
    return tuple(info.digest for info in queue.waiting), queue.passed_over


def report_store(store: Store) -> StoreReport:
    """Read everything of `store`. Errors: StoreError from a strict one."""
    stats = store.stats()
    decisions: dict[str, list[Decision]] = {}
    for decision in store.decisions():
        decisions.setdefault(decision.subgraph, []).append(decision)
    infos = store.subgraphs()
    waiting, passed_over = tuning_queue(store)
    rows = tuple(
        _subgraph_row(
            info, decisions.get(info.digest, []), store.measurements(info.digest), passed_over.get(info.digest, "")
        )
        for info in infos
    )
    return StoreReport(
        url="" if stats is None else stats.url,
        made_s=time.time(),
        subgraphs=rows,
        backends=_backend_rows(rows),
        environments=_environment_rows(store.environments(), rows),
        waiting=waiting,
    )


def _subgraph_row(
    info: SubgraphInfo, decisions: list[Decision], measurements: Sequence[Measurement], passed_over: str
) -> SubgraphRow:
    newest = {(m.backend, m.environment, m.shape_class): m for m in measurements}  # oldest first, so the last one stays
    attempts = sorted(map(_attempt_row, newest.values()), key=lambda row: (-(row.speedup or 0.0), row.backend))
    ordered = sorted(decisions, key=lambda decision: -decision.decided_s)
    return SubgraphRow(
        digest=info.digest,
        note=info.note,
        n_ops=info.n_ops,
        used_s=info.used_s,
        run_s=info.run_s,
        runs=info.runs,
        decisions=tuple(ordered),
        attempts=tuple(attempts),
        passed_over=passed_over,
    )


def _attempt_row(m: Measurement) -> AttemptRow:
    timed = m.outcome is Outcome.OK and m.eager_s and m.median_s
    speedup = m.eager_s / m.median_s if timed and m.eager_s and m.median_s else None
    return AttemptRow(m.backend, m.outcome, speedup, m.median_s, m.detail, m.environment, m.shape_class)


def _backend_rows(rows: Iterable[SubgraphRow]) -> tuple[BackendRow, ...]:
    attempts: dict[str, list[AttemptRow]] = {}
    chosen: Counter[str] = Counter()
    for row in rows:
        chosen.update(backend for backend, _, _ in {(d.backend, d.environment, d.shape_class) for d in row.decisions})
        for attempt in row.attempts:
            attempts.setdefault(attempt.backend, []).append(attempt)
    made = [_backend_row(name, attempts.get(name, []), chosen[name]) for name in {*attempts, *chosen}]
    return tuple(sorted(made, key=lambda row: (-row.chosen, row.backend)))


def _backend_row(name: str, attempts: Sequence[AttemptRow], chosen: int) -> BackendRow:
    logs = [math.log(attempt.speedup) for attempt in attempts if attempt.speedup]
    failures = Counter(attempt.detail for attempt in attempts if attempt.outcome is not Outcome.OK)
    return BackendRow(
        backend=name,
        tried=len(attempts),
        chosen=chosen,
        outcomes=dict(Counter(attempt.outcome.value for attempt in attempts)),
        mean_speedup=math.exp(sum(logs) / len(logs)) if logs else None,
        common_failure=failures.most_common(1)[0][0] if failures else "",
    )


def _environment_rows(texts: dict[str, str], rows: Iterable[SubgraphRow]) -> tuple[EnvironmentRow, ...]:
    """The newest environment is the one of the newest decision: environments carry no date of their own."""
    decisions = sorted((d for row in rows for d in row.decisions), key=lambda decision: -decision.decided_s)
    counts = Counter(decision.environment for decision in decisions)
    newest = next((texts[d.environment] for d in decisions if d.environment in texts), "")
    made = [
        EnvironmentRow(digest, counts[digest], explain_difference(newest, environment_of_text(text).text))
        for digest, text in texts.items()
    ]
    return tuple(sorted(made, key=lambda row: (-row.decisions, row.digest)))
