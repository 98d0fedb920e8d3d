"""The plan of one step, and the way of each of its segments from replay to a compiled artifact.

    planned -> observed (which memory outlives it) -> described (its ops and values) -> captured (its live inputs)
            -> compiled and checked in another process -> adopted

Everything happens between two iterations of the user's loop and takes a moment; compiling happens elsewhere.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coexec import choose
from coexec.backends.cache import Artifact, Failure
from coexec.backends.key import artifact_key
from coexec.backends.snapshot import delete_snapshot
from coexec.backends.worker import CompileWorker, Finished
from coexec.config import Options, private_cache_dir
from coexec.errors import CacheFolderError
from coexec.graph.tracegraph import TraceGraph
from coexec.intercept.background import pacer
from coexec.intercept.native import native_if_ready
from coexec.plan.cases import Plan, assign_cases
from coexec.plan.segments import Segment, cut_segments
from coexec.runtime.benefit import quartile
from coexec.runtime.spec_builder import (
    BuiltSegment,
    DescribedOp,
    NotDescribableError,
    build_segment,
    capture_plan,
    snapshot_index,
)

STABLE_ITERATIONS = 2
"""Co-executed iterations without a new path before a plan is made."""

OBSERVED_ITERATIONS = 2
"""Passes through a segment before it is described: liveness is the union of what they showed."""

POLL_INTERVAL_S = 0.02

MAX_DISCARDS = 8
"""A compiled segment whose runs were discarded this often, and more often than used, goes back to replay."""

_snapshot_numbers = itertools.count()
_worker: CompileWorker | None = None


def compile_worker() -> CompileWorker:
    """Returns the compile worker of this process; steps share it."""
    global _worker
    if _worker is None:
        _worker = CompileWorker(choose.segment_cache())
    return _worker


class State(enum.Enum):
    """How far a segment is."""

    OBSERVED = "replay: observing what outlives it"
    DESCRIBED = "replay: waiting for live inputs"
    COMPILING = "replay: compiling in the background"
    COMPILED = "inductor"
    REPLAY = "replay"  # for good; `reason` says why


@dataclass(slots=True)
class ManagedSegment:
    """One segment of the plan."""

    planned: Segment
    nodes: tuple[int, ...]
    native: Any  # csrc Segment
    state: State = State.OBSERVED
    reason: str = ""
    passes: int = 0  # of `native.passes`, when observation began
    built: BuiltSegment | None = None
    job: int = -1
    redescribed: int = 0


class SegmentManager:
    """Keeps the plan of one step and adopts compiled artifacts."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plan: Plan | None = None
        self.segments: list[ManagedSegment] = []
        self.compile_failures: Counter[str] = Counter()
        self._stable = 0
        self._stale = True
        self._described = False
        self._captured: ManagedSegment | None = None
        self._capture_path: Path | None = None
        self._capture_tries = 0
        self._last_poll_s = 0.0
        self._active = False  # some segment is on its way
        self._iterations = 0
        self._install: Any = None

    # ------------------------------------------------------------------------------------------ between iterations

    def graph_changed(self) -> None:
        """The TraceGraph grew: the plan is out of date."""
        self._stale = True
        self._stable = 0

    def after_iteration(self, native: Any, graph: TraceGraph) -> None:
        """One iteration ran wholly in co-execution: take the next step for segments that are on their way."""
        self._iterations += 1
        if self._stale:
            self._stable += 1
            if self._stable < STABLE_ITERATIONS:
                return
            self._make_plan(native, graph)
        if self.options.backend == "replay" or self.options.numerics == "exact":
            return
        if self._active:
            self._advance(native, graph)
        if self._iterations % 16 == 0:
            self._review(native)

    def _make_plan(self, native: Any, graph: TraceGraph) -> None:
        """Case assignment, then segments; segments that are as they were keep what they have."""
        self._stale = False
        self.plan = assign_cases(graph)
        cut = cut_segments(graph, self.plan, native.bytes_written)
        known = {(s.nodes, s.planned.kind): s for s in self.segments if not s.native.stale}
        make = _native_core().Segment
        self.segments = [
            replace(known[planned.nodes, planned.kind], planned=planned)
            if (planned.nodes, planned.kind) in known
            else ManagedSegment(planned, planned.nodes, make(list(planned.nodes)), *_initial_state(planned))
            for planned in cut.segments
        ]
        self._abandon_capture(native)
        self._described = False
        self._reinstall(native)
        self._active = any(s.state in _UNDER_WAY for s in self.segments)

    def _reinstall(self, native: Any) -> None:
        native.install_segments([segment.native for segment in self.segments])

    def _advance(self, native: Any, graph: TraceGraph) -> None:
        if self._described:
            self._described = False
            self._describe(native, graph)
        if any(self._is_observed(segment) for segment in self.segments):
            native.describing = self._described = True
        self._finish_capture(native)
        self._start_capture(native)
        self._adopt(native)
        self._active = any(s.state in _UNDER_WAY for s in self.segments)

    # ------------------------------------------------------------------------------------------------- describing

    def _is_observed(self, segment: ManagedSegment) -> bool:
        """Seen often enough to be described; one that Python passes rarely is not waited for."""
        return segment.state is State.OBSERVED and segment.native.passes - segment.passes >= OBSERVED_ITERATIONS

    def _describe(self, native: Any, graph: TraceGraph) -> None:
        path = set(native.path)
        ready = [segment for segment in self.segments if self._is_observed(segment) and segment.nodes[0] in path]
        if not ready:
            return
        description = [DescribedOp(*entry) for entry in native.description()]
        externals = native.externals()
        survivors = native.survivors()
        for segment in ready:
            nodes = [graph.nodes[node] for node in segment.nodes]
            random_nodes = {node.id for node in nodes if node.random}
            writes = {node.id: node.writes for node in nodes if node.writes}
            try:
                segment.built = build_segment(
                    segment.nodes, segment.planned.kind == "commit", description, externals, survivors,
                    random_nodes, writes, torch.get_num_threads(),
                )  # fmt: skip
            except NotDescribableError as error:
                self._stay(segment, str(error))
                continue
            segment.native = native.make_segment(segment.built.native)
            segment.state = State.DESCRIBED
            self._use_known(segment)
        self._reinstall(native)

    def _use_known(self, segment: ManagedSegment) -> None:
        """Compiled before, by this process or another one: no capture, no compilation."""
        assert segment.built is not None
        known = compile_worker().cache.get(artifact_key(segment.built.spec))
        if isinstance(known, Artifact):
            self._load(segment, known)
        elif isinstance(known, Failure):
            self._stay(segment, f"{known.kind}: {known.reason}")

    # ------------------------------------------------------------------------------------------------- capturing

    def _start_capture(self, native: Any) -> None:
        if self._captured is not None:
            return
        segment = next((s for s in self.segments if s.state is State.DESCRIBED), None)
        if segment is None or segment.built is None:
            return
        try:
            folder = private_cache_dir("compile")
        except CacheFolderError as error:
            self._stay(segment, f"no cache folder: {error}")
            return
        self._capture_path = folder / f"live-{os.getpid()}-{next(_snapshot_numbers)}.json"
        binary = self._capture_path.with_suffix(".bin")
        capture = _native_core().Capture
        native.capture = capture(segment.native.id, str(binary), segment.built.spec.random, capture_plan(segment.built))
        self._captured, self._capture_tries = segment, 0

    def _finish_capture(self, native: Any) -> None:
        segment, capture = self._captured, native.capture
        if segment is None or capture is None or segment.built is None or self._capture_path is None:
            return
        starts = capture.starts
        if any(start < 0 for start in starts) or (segment.built.spec.random and capture.generator_start < 0):
            self._capture_tries += 1
            touched = any(start >= 0 for start in starts)
            if capture.failed or touched or self._capture_tries > 64:
                self._abandon_capture(native)
                self._stay(segment, "its live inputs could not be captured")
            return
        generator = (capture.generator_start, capture.generator_nbytes) if segment.built.spec.random else None
        index = snapshot_index(segment.built, starts, generator)
        self._capture_path.write_text(json.dumps(index))
        segment.job = compile_worker().submit(segment.built.spec, self._capture_path, timed=False)
        segment.state = State.COMPILING
        native.capture = None
        self._captured = self._capture_path = None

    def _abandon_capture(self, native: Any) -> None:
        if self._capture_path is not None:
            delete_snapshot(self._capture_path)
        native.capture = None
        self._captured = self._capture_path = None

    # ------------------------------------------------------------------------------------------------- adopting

    def _adopt(self, native: Any) -> None:
        now_s = time.monotonic()
        if now_s - self._last_poll_s < POLL_INTERVAL_S:
            return
        self._last_poll_s = now_s
        mailbox.collect()
        for segment in self.segments:
            if segment.state is State.COMPILING and (done := mailbox.take(segment.job)) is not None:
                if done.artifact is not None:
                    self._load(segment, done.artifact)
                else:
                    failure = done.failure
                    self._stay(segment, f"{failure.kind}: {failure.reason}" if failure else "no result")

    def _load(self, segment: ManagedSegment, artifact: Artifact) -> None:
        try:
            segment.native.load(str(artifact.library))
        except RuntimeError as error:
            self._stay(segment, f"the artifact does not load: {error}")
            return
        segment.state = State.COMPILED
        segment.reason = ""

    def _stay(self, segment: ManagedSegment, reason: str) -> None:
        segment.state, segment.reason = State.REPLAY, reason
        self.compile_failures[reason.split(":")[0]] += 1

    def _review(self, native: Any) -> None:
        """Compiled segments that do not fit after all are described anew or go back to replay."""
        for segment in self.segments:
            if segment.state is State.COMPILED and segment.native.slower:
                self._stay(segment, _trial_result(segment.native))
            if segment.state is not State.COMPILED or segment.native.discards <= MAX_DISCARDS:
                continue
            if segment.native.discards <= segment.native.runs:
                continue
            reason = segment.native.last_discard
            segment.native.unload()
            if segment.redescribed < 3 and not reason.startswith("Python went"):
                segment.redescribed += 1
                segment.state, segment.passes = State.OBSERVED, segment.native.passes
                self._active = True
            else:
                self._stay(segment, f"its runs were discarded: {reason}")

    # ---------------------------------------------------------------------------------------------------- reporting

    def by_executor(self) -> dict[str, int]:
        """Returns how many segments each executor has; Python's own ops are not counted."""
        counts = Counter(
            "inductor" if s.state is State.COMPILED else "replay" for s in self.segments if s.planned.kind != "python"
        )
        return dict(counts)

    def switches(self) -> int:
        """Returns how many Switch-Cases wait for Case Select."""
        return sum(case.is_branch for case in self.plan.switch_cases) if self.plan else 0

    def describe(self) -> list[str]:
        """Returns a line per segment with work in it: what it is, its executor, and why."""
        return [_describe(segment) for segment in self.segments if segment.planned.compile]

    def changing(self) -> bool:
        """Whether the plan or a segment's executor is about to change."""
        return self._stale or self.compiling()

    def compiling(self) -> bool:
        """Whether the compile worker still has a segment of this step."""
        return any(s.state is State.COMPILING for s in self.segments)


_UNDER_WAY = (State.OBSERVED, State.DESCRIBED, State.COMPILING)


def _describe(segment: ManagedSegment) -> str:
    native = segment.native
    text = f"{segment.planned.kind} segment of {len(segment.nodes)} ops: {segment.state.value}"
    if segment.reason:
        text += f": {segment.reason}"
    text += f", {native.runs} compiled runs"
    if segment.state is State.COMPILED and not native.trial and native.compiled_s:
        compiled_s, replayed_s = quartile(native.compiled_s), quartile(native.replayed_s)
        text += f" ({compiled_s * 1e3:.3f} ms; {replayed_s * 1e3:.3f} ms replayed)"
    if native.discards:
        text += f", {native.discards} discarded, the last because: {native.last_discard}"
    return text


def _native_core() -> Any:
    """The loaded core: a step that has a plan runs in it."""
    module = native_if_ready()
    assert module is not None
    return module


def _initial_state(planned: Segment) -> tuple[State, str]:
    if planned.compile:
        return State.OBSERVED, ""
    return State.REPLAY, "Python runs it" if planned.kind == "python" else "too few ops"


def _trial_result(native: Any) -> str:
    compiled_s, replayed_s = quartile(native.compiled_s), quartile(native.replayed_s)
    return f"slower: compiled {compiled_s * 1e3:.3f} ms, replayed {replayed_s * 1e3:.3f} ms, by turns in this step"


class Mailbox:
    """Finished jobs by number: several steps share one worker."""

    def __init__(self) -> None:
        self._finished: dict[int, Finished] = {}

    def collect(self) -> None:
        """Takes what the worker has finished."""
        if _worker is not None:
            self._finished.update((done.job, done) for done in _worker.poll())

    def take(self, job: int) -> Finished | None:
        """Returns and forgets the end of a job, or None if it runs."""
        return self._finished.pop(job, None)

    def has(self, job: int) -> bool:
        """Whether the job's end is waiting to be taken."""
        return job in self._finished


mailbox = Mailbox()


def wait_compiled(manager: SegmentManager, timeout_s: float) -> bool:
    """Blocks until no segment of `manager` is being compiled. Returns False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        mailbox.collect()
        jobs = [s.job for s in manager.segments if s.state is State.COMPILING]
        if all(mailbox.has(job) for job in jobs):
            manager._last_poll_s = 0.0  # the next iteration adopts
            return True
        if time.monotonic() > deadline_s:
            return False
        pacer.full_speed()
        time.sleep(0.05)
