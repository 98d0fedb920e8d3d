"""The plan of one step, and the way of each of its segments from replay to compiled artifacts.

    planned -> observed (which memory outlives it) -> described (its ops and values) -> captured (its live inputs)
            -> compiled and checked in another process -> adopted

A segment has one version for the shapes that were described first. Where others come, it gets one for many sizes
(:mod:`coexec.backends.symbolic`), or, if that cannot be had, versions for the most frequent shapes.
Everything happens between two iterations of the user's loop and takes a moment; compiling happens elsewhere.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from coexec.backends.cache import Artifact, Failure
from coexec.backends.expressions import NotExpressibleError
from coexec.backends.key import artifact_key
from coexec.config import Options, debug_level
from coexec.graph.recurring import recurring
from coexec.graph.tracegraph import TraceGraph
from coexec.intercept.background import pacer
from coexec.intercept.native import loaded_core
from coexec.plan.cases import Plan, assign_cases
from coexec.plan.check import check_plan
from coexec.plan.segments import Segment, cut_segments
from coexec.runtime.benefit import quartile
from coexec.runtime.capturing import Captures
from coexec.runtime.compile_jobs import compile_worker, mailbox
from coexec.runtime.description import Description
from coexec.runtime.dynamic_segment import unify_segments
from coexec.runtime.history import counted
from coexec.runtime.spec_builder import BuiltSegment, NotDescribableError, build_segment
from coexec.runtime.versions import MAX_DESCRIBED, MAX_SPECIALISED, ManagedSegment, State, Version

STABLE_ITERATIONS = 2
"""Co-executed iterations without a new path before a plan is made."""

OBSERVED_ITERATIONS = 2
"""Passes through a segment before it is described: liveness is the union of what they showed."""

POLL_INTERVAL_S = 0.02

REVIEW_ITERATIONS = 16

MAX_DISCARDS = 8
"""A version whose runs were discarded this often, and more often than used, is given up."""

MAX_REDESCRIBED = 3

MAX_TRIES = 512
"""Iterations of one segment that are described in search of what is still needed of it."""

OPS_AROUND = 8
"""So many nodes of a segment there must be for each one that cannot be compiled, or it is replayed as it is."""

NOTED_AGAIN = 10
"""How many times more runs there are when the database hears of them again: a write in the background, which a long
training makes a few times."""


class SegmentManager:
    """Keeps the plan of one step and adopts compiled artifacts."""

    def __init__(self, options: Options, where: str = "") -> None:
        self.options = options
        self.where = where  # name and place of the step, for people
        self.plan: Plan | None = None
        self.segments: list[ManagedSegment] = []
        self.compile_failures: Counter[str] = Counter()
        self._stable = 0
        self._stale = True
        self._described = False
        self.captures = Captures(options, where, self._build, self._stay)
        self._last_poll_s = 0.0
        self._active = False  # some segment is on its way
        self._iterations = 0
        self._unplanned = 0  # edges that the plan leaves out
        self._late: set[int] = set()  # nodes whose input Python names too late for the segment that they were in
        self._apart: set[int] = set()  # nodes that no backend compiles
        self._edges_taken = 0  # of the native step, when it was last asked which ones

    # ------------------------------------------------------------------------------------------ between iterations

    def graph_changed(self) -> None:
        """The TraceGraph grew: the plan is out of date."""
        self._stale = True
        self._stable = 0

    def after_iteration(self, native: Any, graph: TraceGraph) -> None:
        """One iteration ran wholly in co-execution: take the next step for segments that are on their way."""
        self._iterations += 1
        self._wake(native, graph)
        if self._stale:
            self._stable += 1
            if self._stable < STABLE_ITERATIONS:
                return
            self._make_plan(native, graph)
        if self._only_replay():
            return
        if self._active:
            self._advance(native, graph)
        if self._iterations % REVIEW_ITERATIONS == 0:
            self._review(native)

    def _wake(self, native: Any, graph: TraceGraph) -> None:
        """An edge that was the first iteration's alone, and that another one has taken, belongs to the plan."""
        if graph.first_only and native.edges_taken != self._edges_taken:
            self._edges_taken = native.edges_taken
            graph.first_only -= {edge for edge in graph.first_only if native.taken(*edge)}
        if not self._stale and len(graph.first_only) < self._unplanned:
            self.graph_changed()

    def _make_plan(self, native: Any, graph: TraceGraph) -> None:
        """Case assignment, then segments; segments that are as they were keep what they have."""
        self._stale = False
        planned_for = recurring(graph)
        self.plan = assign_cases(planned_for)
        if debug_level() >= 2:
            check_plan(self.plan, planned_for)
        cut = cut_segments(planned_for, self.plan, native.bytes_written, late=self._late, apart=self._apart)
        known, under_way = {_sort_of(s.planned): s for s in self.segments if not s.native.stale}, self._jobs()
        make = loaded_core().PlannedSegment
        self.segments = [
            replace(known[_sort_of(planned)], planned=planned)
            if _sort_of(planned) in known
            else ManagedSegment(planned, planned.nodes, make(list(planned.nodes)), self._stays_on_replay(planned))
            for planned in cut.segments
        ]
        mailbox.drop(under_way - self._jobs())
        self.captures.abandon(native)
        self._described = False
        self._reinstall(native)
        native.mark_loop_conds([node for loop in self.plan.loops for node in loop.conds])
        unplanned = graph.first_only if planned_for is not graph else ()
        self._unplanned = len(unplanned)
        native.mark_unplanned(list(unplanned))
        self._active = any(self._wants_something(s) for s in self.segments)

    def _only_replay(self) -> str:
        """The option that forbids compiling, or ''."""
        if self.options.numerics == "exact":
            return "numerics='exact'"
        return "backend='replay'" if self.options.backend == "replay" else ""

    def _stays_on_replay(self, planned: Segment) -> str:
        """Why nothing will be compiled for it; empty if something may."""
        if planned.kind == "python":
            return "one op that Python waits for"
        if not planned.compile:
            return "in a loop whose trip count varies" if planned.in_loop else "too few ops"
        option = self._only_replay()
        return f"{option} compiles nothing" if option else ""

    def abandon(self, native: Any) -> None:
        """Another manager takes over: nothing of this one is left under way."""
        self.captures.abandon(native)
        native.describing = False
        mailbox.drop(self._jobs())
        self.segments = []
        self.graph_changed()

    def _jobs(self) -> set[int]:
        """What the compile worker still has of it, or has finished and nobody has looked at."""
        return {v.job for s in self.segments for v in s.versions if v.state is State.COMPILING}

    def _reinstall(self, native: Any) -> None:
        prefer = self.options.dynamic is True
        native.install_segments([(segment.native, segment.loaded(prefer)) for segment in self.segments])

    def _advance(self, native: Any, graph: TraceGraph) -> None:
        described = Description(native) if self._described else None
        self._described = False
        if described is not None:
            self._describe(described, graph)
        self.captures.finish(native, described, graph)
        self.captures.start(native, self.segments)
        self._adopt(native)
        self._set_apart(graph)
        if any(self._wants_description(segment) for segment in self.segments) or self.captures.of_many_sizes:
            native.describing = self._described = True
        self._active = any(self._wants_something(s) for s in self.segments)

    # ------------------------------------------------------------------------------------------------- describing

    def _wants_something(self, segment: ManagedSegment) -> bool:
        return bool(segment.under_way()) or (not segment.fixed and not segment.versions) or self._searches(segment)

    def _wants_description(self, segment: ManagedSegment) -> bool:
        if segment.fixed:
            return False
        if not segment.versions:  # one that Python passes rarely is not waited for
            return bool(segment.native.passes - segment.passes >= OBSERVED_ITERATIONS)
        return self._searches(segment)

    def _searches(self, segment: ManagedSegment) -> bool:
        """Whether a pass with other shapes than those described is looked for."""
        if segment.fixed or not segment.versions or segment.tries >= MAX_TRIES or len(segment.native.signatures) < 2:
            return False
        return self._wants_many_sizes(segment) or bool(self._missing(segment))

    def _wants_many_sizes(self, segment: ManagedSegment) -> bool:
        return self.options.dynamic is not False and segment.dynamic is None and not segment.not_dynamic

    def _missing(self, segment: ManagedSegment) -> list[int]:
        """Signatures that should have a version of their own."""
        dynamic = segment.dynamic
        if self._wants_many_sizes(segment) or (dynamic is not None and dynamic.state is not State.REPLAY):
            return []
        if len(segment.specialised()) >= MAX_SPECIALISED:
            return []
        has = {version.signature for version in segment.specialised()}
        return [signature for signature in segment.frequent() if signature not in has]

    def _is_of_use(self, segment: ManagedSegment, signature: int) -> bool:
        """Whether a pass with these shapes says something that is looked for."""
        new = self._wants_many_sizes(segment) and signature not in segment.described
        return new or signature in self._missing(segment)

    def _describe(self, described: Description, graph: TraceGraph) -> None:
        """Builds what the latest iteration shows of segments that want it."""
        for segment in self.segments:
            if not self._wants_description(segment) or not described.covers(segment):
                continue
            segment.tries += bool(segment.versions)
            signature = segment.native.last_signature
            if segment.versions and not self._is_of_use(segment, signature):
                continue
            if (built := self._build(segment, described, graph)) is None:
                continue
            if not segment.versions or signature in self._missing(segment):
                self._add_version(segment, Version(built, described.native.make_segment(built.native), signature))
            self._look_for_many_sizes(segment, signature, built, described)
        self._reinstall(described.native)

    def _build(self, segment: ManagedSegment, described: Description, graph: TraceGraph) -> BuiltSegment | None:
        if not described.ops:  # it fell back: what is known is of a later one
            return None
        nodes = [graph.nodes[node] for node in segment.nodes]
        random_nodes = {node.id for node in nodes if node.random}
        writes = {node.id: node.writes for node in nodes if node.writes}
        try:
            return build_segment(
                segment.nodes, segment.planned.kind == "commit", described.ops, described.externals,
                described.survivors, random_nodes, writes, torch.get_num_threads(),
            )  # fmt: skip
        except NotDescribableError as error:
            if segment.versions:  # the first shapes could be described: these are left out
                segment.tries += MAX_TRIES // 8
            else:
                self._give_up(segment, str(error))
            return None

    def _look_for_many_sizes(
        self, segment: ManagedSegment, signature: int, built: BuiltSegment, described: Description
    ) -> None:
        """With each new set of shapes: do two of them differ in sizes only?"""
        others = list(segment.described.values())
        segment.described[signature] = built
        if not self._wants_many_sizes(segment):
            segment.described.clear()
            return
        why = ""
        for other in reversed(others):
            try:
                spec, patterns = unify_segments([other, built])
            except NotExpressibleError as error:
                why = str(error)
                continue
            native = described.native.make_segment(built.native)
            native.make_dynamic(patterns)
            self._add_version(segment, Version(built, native, 0, spec))
            segment.described.clear()
            return
        if len(segment.described) >= MAX_DESCRIBED:
            segment.not_dynamic = why
            segment.described.clear()

    def _add_version(self, segment: ManagedSegment, version: Version) -> None:
        """Compiled before, by this process or another one: no capture, no compilation."""
        segment.versions.append(version)
        version.key = artifact_key(version.spec)
        known = compile_worker().cache.get(version.key)
        if isinstance(known, Artifact):
            if known.is_checked:  # otherwise it is, on live inputs, before it takes over
                self._load(segment, version, known)
        elif isinstance(known, Failure):
            self._refused(segment, version, known)

    # ------------------------------------------------------------------------------------------------- adopting

    def _adopt(self, native: Any) -> None:
        if not self._collect():
            return
        adopted = False
        for segment, version in [(s, v) for s in self.segments for v in s.versions if v.state is State.COMPILING]:
            if (done := mailbox.take(version.job)) is None:
                continue
            if done.artifact is not None:
                self._load(segment, version, done.artifact)
            else:
                self._refused(segment, version, done.failure or Failure(version.key, "compile error", "no result"))
            adopted = True
        if adopted:
            self._reinstall(native)

    def _collect(self) -> bool:
        """Takes what the worker has finished, unless that was done a moment ago: then it returns False."""
        now_s = time.monotonic()
        if now_s - self._last_poll_s < POLL_INTERVAL_S:
            return False
        self._last_poll_s = now_s
        mailbox.collect()
        return True

    def jobs(self) -> tuple[int, int]:
        """Returns how many compilations of this step have ended, to be adopted, and how many have not.

        While no iteration is co-executed, nothing else looks at the worker, which starts its next job when asked.
        """
        self._collect()
        jobs = self._jobs()
        ended = sum(mailbox.has(job) for job in jobs)
        if ended:
            self._last_poll_s = 0.0  # the next co-executed iteration adopts
        return ended, len(jobs) - ended

    def _load(self, segment: ManagedSegment, version: Version, artifact: Artifact) -> None:
        version.key = artifact.key  # one for many sizes got its last observation after it was looked up
        try:
            if version.symbolic is not None:
                version.native.set_guards(artifact.meta["guards"])
            version.native.load(str(artifact.library))
        except (RuntimeError, KeyError) as error:
            self._stay(segment, version, f"the artifact does not load: {error}")
            return
        version.state, version.reason = State.COMPILED, ""
        version.tuned = str(artifact.meta.get("tuned", ""))
        if version.symbolic is not None:  # nobody has waited for those whose shapes have not come again
            segment.versions = [v for v in segment.versions if v.state is not State.DESCRIBED]

    def _stay(self, segment: ManagedSegment, version: Version, reason: str) -> None:
        version.state, version.reason = State.REPLAY, reason
        segment.tries = 0  # another version may be looked for instead
        self.compile_failures[reason.split(":")[0]] += 1

    def _refused(self, segment: ManagedSegment, version: Version, failure: Failure) -> None:
        self._stay(segment, version, f"{failure.kind}: {failure.reason}")
        if version.symbolic is None:
            segment.not_lowerable = str(failure.facts.get("op", ""))

    def _set_apart(self, graph: TraceGraph) -> None:
        """Ops that cannot be compiled get segments of their own, if enough is left around them to be compiled."""
        for segment in (s for s in self.segments if s.not_lowerable):
            ops = [node for node in segment.nodes if graph.nodes[node].op == segment.not_lowerable]
            segment.not_lowerable = ""
            if len(ops) * OPS_AROUND <= len(segment.nodes):
                self._apart.update(ops)
                self.graph_changed()

    def _give_up(self, segment: ManagedSegment, reason: str) -> None:
        segment.fixed = reason
        self.compile_failures[reason.split(":")[0]] += 1

    def _review(self, native: Any) -> None:
        """Versions that do not fit after all are described anew or given up."""
        for segment, version in [(s, v) for s in self.segments for v in s.versions if v.state is State.COMPILED]:
            _note_runs(version)
            if version.native.slower:
                self._stay(segment, version, _trial_result(version.native))
            elif version.native.discards > MAX_DISCARDS and version.native.discards > version.native.runs:
                if not self._cut_before_late_input(segment):
                    self._drop(segment, version, version.native.last_discard)
            else:
                continue
            self._reinstall(native)
        self._active = any(self._wants_something(s) for s in self.segments)

    def _cut_before_late_input(self, segment: ManagedSegment) -> bool:
        """Python stops inside of the segment before it names an input that cannot be predicted, pass after pass: the
        next plan cuts there. False if that is not the case, or has been tried."""
        native = segment.native
        if native.awaited <= MAX_DISCARDS or native.awaited_node in self._late:
            return False
        self._late.add(native.awaited_node)
        self.graph_changed()
        return True

    def _drop(self, segment: ManagedSegment, version: Version, reason: str) -> None:
        if segment.redescribed < MAX_REDESCRIBED and not reason.startswith("Python went"):
            segment.redescribed += 1
            segment.versions.remove(version)
            segment.passes, segment.tries = segment.native.passes, 0
        else:
            self._stay(segment, version, f"its runs were discarded: {reason}")

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

    def loops(self) -> int:
        """Returns how many While nodes the plan has."""
        return len(self.plan.loops) if self.plan else 0

    def describe(self) -> list[str]:
        """Returns a line per segment with work in it and per version of it: what it is, its executor, and why.

        The others are counted by their reason.
        """
        lines = [line for segment in self.segments if segment.planned.compile for line in segment.describe()]
        others = Counter(s.fixed for s in self.segments if not s.planned.compile and s.planned.kind != "python")
        lines += [f"{counted(number, 'segment')}: replay ({reason})" for reason, number in others.items() if reason]
        waited = sum(segment.planned.kind == "python" for segment in self.segments)
        return lines + [f"{counted(waited, 'operation')} between segments that Python waits for"] * bool(waited)

    def changing(self) -> bool:
        """Whether the plan or a segment's executor is about to change."""
        return self._stale or self.compiling()

    def only_compiling(self) -> bool:
        """Whether the plan stays as it is, and some executor is about to change."""
        return not self._stale and self.compiling()

    def compiling(self) -> bool:
        """Whether the compile worker still has a segment of this step."""
        return any(v.state is State.COMPILING for s in self.segments for v in s.versions)


def _note_runs(version: Version) -> None:
    """Tell the database how long a run takes: once the trial is over, then each time that there are many times more."""
    run_s, runs = version.run_s(), version.native.runs
    if run_s is not None and runs >= max(1, version.noted_runs * NOTED_AGAIN):
        compile_worker().cache.note_runs(version.key, run_s, runs - version.noted_runs)
        version.noted_runs = runs


def _sort_of(planned: Segment) -> tuple[tuple[int, ...], str, bool, bool]:
    """What must be the same for a segment to keep what it has: a loop may have grown around its ops."""
    return planned.nodes, planned.kind, planned.compile, planned.in_loop


def _trial_result(native: Any) -> str:
    compiled_s, replayed_s = quartile(native.compiled_s), quartile(native.replayed_s)
    return f"slower: compiled {compiled_s * 1e3:.3f} ms, replayed {replayed_s * 1e3:.3f} ms, by turns in this step"


def wait_compiled(manager: SegmentManager, timeout_s: float) -> bool:
    """Blocks until no segment of `manager` is being compiled. Returns False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        mailbox.collect()
        if all(mailbox.has(job) for job in manager._jobs()):
            manager._last_poll_s = 0.0  # the next iteration adopts
            return True
        if time.monotonic() > deadline_s:
            return False
        pacer.full_speed()
        time.sleep(0.05)
