"""`tune`: finds the fastest right candidate for every stored graph and segment not decided yet, within a budget."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from coexec.backends.key import is_segment
from coexec.config import private_cache_dir
from coexec.subgraphs.entries import Outcome, SubgraphInfo
from coexec.subgraphs.store import Store
from coexec.tuning.graph_tuner import Workshop, tune_graph
from coexec.tuning.markers import Markers
from coexec.tuning.nursery import Nursery
from coexec.tuning.queue import selected, tools_here
from coexec.tuning.report import GraphReport, Progress, TuneReport
from coexec.tuning.roster import Roster
from coexec.tuning.segment_tuner import tune_segment
from coexec.tuning.settings import PREPARE, TuneSettings
from coexec.tuning.shelf import Shelf

Listener = Callable[[Progress], None]


def tune(
    store: Store | None = None,
    settings: TuneSettings | None = None,
    *,
    progress: Listener | None = None,
    **limits: Any,
) -> TuneReport:
    """Tune every stored graph and segment that is not decided in this environment; resume where an earlier run ended.

    Args:
        store: default: the store of the settings. It is used as a strict one.
        settings: limits; or give the fields of :class:`TuneSettings` as keywords (`budget_s=60`).
        progress: hears every event, from any of the workers' threads, one at a time.

    Returns:
        What was tried and decided. Everything in it is in the store already.

    Raises:
        StoreError: the store cannot be used. CandidateError: a name in `candidates` is none. ValueError: a limit.

    Example::

        report = tune(budget_s=600, progress=lambda event: print(event.stage, event.candidate))
    """
    settings = replace(settings or TuneSettings(), **limits)
    run = _Run(_strict(store), settings, progress or (lambda event: None))
    return run.run()


class _Run:
    """One run of the tuner."""

    def __init__(self, store: Store, settings: TuneSettings, progress: Listener) -> None:
        self.settings, self.progress = settings, progress
        self.start_s = time.monotonic()
        self.stopped = False
        self.telling = threading.Lock()
        tools = tools_here(settings)
        markers = Markers(_marks_of(store))
        self.nursery = Nursery(tools.threads, beside_others=settings.only == PREPARE)
        self.shop = Workshop(
            store=store,
            markers=markers,
            roster=Roster(markers, self.nursery, settings.memory_bytes),
            shelf=Shelf(private_cache_dir("tuning") / "prepared"),
            settings=settings,
            tools=tools,
            deadline_s=self.deadline_s,
        )

    def run(self) -> TuneReport:
        """All graphs."""
        graphs = selected(self.shop.store, self.settings)
        numbered = list(enumerate(graphs))
        self.shop.shelf.sweep()
        with contextlib.closing(self.nursery):
            if self.settings.workers == 1:
                reports = [self.tune_one(number, info, len(graphs)) for number, info in numbered]
            else:
                self.nursery.prepare()  # from this thread: the kernel ends it with the thread that started it
                reports = self.in_parallel(numbered, len(graphs))
        elapsed_s = time.monotonic() - self.start_s
        return TuneReport(tuple(reports), self.shop.tools.unavailable, elapsed_s, time.monotonic() > self.deadline_s())

    def in_parallel(self, numbered: Iterable[tuple[int, SubgraphInfo]], graphs: int) -> list[GraphReport]:
        """The graphs over worker threads; an interrupt ends what they wait for."""
        with ThreadPoolExecutor(self.settings.workers, thread_name_prefix="coexec-tune") as pool:
            futures = [pool.submit(self.tune_one, number, info, graphs) for number, info in numbered]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self.stopped = True  # every wait of a worker ends at the deadline
                pool.shutdown(wait=False, cancel_futures=True)
                self.shop.roster.end_all()
                raise

    def tune_one(self, number: int, info: SubgraphInfo, graphs: int) -> GraphReport:
        """One graph, with its events."""

        def tell(candidate: str, stage: str, outcome: Outcome | None, speedup: float | None) -> None:
            with self.telling:
                self.progress(Progress(number, graphs, info.digest, info.note, candidate, stage, outcome, speedup))

        if time.monotonic() > self.deadline_s():
            reason = "the budget was spent before its turn"
            return GraphReport(info.digest, info.note, reason=reason, out_of_budget=True)
        tell("", "start", None, None)
        report = (tune_segment if is_segment(info.text) else tune_graph)(self.shop, info, tell)
        tell("", "done", None, report.speedup)
        return report

    def deadline_s(self) -> float:
        """Monotonic time at which everything is to end."""
        if self.stopped:
            return -math.inf
        return math.inf if self.settings.budget_s is None else self.start_s + self.settings.budget_s


def _strict(store: Store | None) -> Store:
    if store is None:
        return Store(strict=True)
    return Store(store.location, strict=True, keyring=store.keyring)


def _marks_of(store: Store) -> Path:
    """Beside the store of this user: claims are between tuners of one machine, decisions are shared by the store."""
    return private_cache_dir("tuning") / "marks" if store.location.shared else store.location.folder / "marks"
