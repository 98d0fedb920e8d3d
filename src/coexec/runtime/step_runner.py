"""StepRunner: one step's life through its phases (Terra, sections 3 and 4)."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from coexec.config import Options, debug_level, disabled, settings
from coexec.errors import ReentrantStepError
from coexec.graph.check import check_graph
from coexec.graph.merge import MergeResult, first_news, merge
from coexec.graph.tracegraph import Node, TraceGraph
from coexec.intercept.background import pacer
from coexec.intercept.native import native_error, native_if_ready, new_step, wait_for_native
from coexec.plan.cases import Plan, While
from coexec.runtime.benefit import BenefitTrial
from coexec.runtime.dynamo import ForceEager, force_eager, watch_compiled_code
from coexec.runtime.folding import LoopFolder
from coexec.runtime.graph_view import GraphView
from coexec.runtime.history import History, Waited, user_line, waits_of
from coexec.runtime.late_errors import name_the_line, same_error
from coexec.runtime.policy import Phase, PhasePolicy
from coexec.runtime.segments import SegmentManager, wait_compiled
from coexec.runtime.stats import Counters, StepStats
from coexec.runtime.waiting import Waiting
from coexec.trace.check import check_trace

NATIVE_ACCESS = (
    "data is not allocated yet",
    "on a tensor with unallocated storage",
    "DispatchKey Fake doesn't correspond to a device",
)
"""What PyTorch says when native code outside the dispatcher meets a tensor without data."""

MAX_NODES = 200_000
"""A TraceGraph larger than this belongs to a program that never repeats itself: it runs as plain eager."""


_runners: weakref.WeakSet[StepRunner] = weakref.WeakSet()
_left_by_other_threads: list[Any] = []  # native steps in a forked child


def _after_fork_in_child() -> None:
    for runner in list(_runners):
        runner.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _settle_overlaps() -> None:
    module = native_if_ready()
    if module is not None:
        module.settle_overlaps()


_trial = threading.local()
"""`plain`: this thread is in a plain eager iteration of a trial or a rest; steps that it calls are plain, too."""


def _inside_plain_iteration() -> bool:
    return getattr(_trial, "plain", False)


_reported = False  # that there will be no native core


def _report_no_core() -> None:
    """Warns, once per process, that every step runs as plain eager PyTorch."""
    global _reported
    error = native_error()
    if error is not None and not _reported:
        _reported = True
        warnings.warn(f"coexec is off in this process: {error}", stacklevel=4)  # call or enter, the public method, user


def _diverged(fallback: tuple[str, str, int, int] | None) -> bool:
    return fallback is not None and fallback[0] in ("new path", "early end")


class StepRunner:
    """Runs a step again and again; decides per iteration whether it is traced, co-executed or left alone."""

    def __init__(self, name: str, options: Options, place: str = "") -> None:
        """`name`, and `place` ("train.py:12"): for people."""
        self.name = name
        self.place = place
        self.options = options
        self.graph = TraceGraph()
        self.policy = PhasePolicy()
        self.counters = Counters()
        self.history = History()
        self.segments = SegmentManager(options, self.where)
        self.loops = LoopFolder()
        self._native: Any = None  # the native Step, once the core is loaded
        self._lock = threading.Lock()
        self._owner: int | None = None  # thread id of the running call
        self._stance: ForceEager | None = None  # of torch.compile, while an iteration runs
        self._started_s = 0.0
        self.benefit = BenefitTrial()
        self.waiting = Waiting()
        self._plain = False  # the running iteration is a plain one of a trial or a rest
        self._python_s = 0.0  # of the latest co-executed call, stalls excluded
        self._stalled_before_s = 0.0  # in calls, when the running one began
        self._retired = False  # what it has learned is not wanted any more
        self._warning = ""  # to be issued when the iteration is over
        self._announced = self.policy.phase
        _runners.add(self)

    @property
    def where(self) -> str:
        """Name and place: "train_step, train.py:12". A block without a name has its place for one."""
        if self.place and self.name.endswith(self.place):
            return self.place
        return f"{self.name}, {self.place}" if self.place else self.name

    # ------------------------------------------------------------------------------------------------------- calling

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one iteration: `function(*args, **kwargs)`, with eager's results."""
        module = native_if_ready()
        if module is not None and module.active_step() is not None:
            return self._nested(module, function, args, kwargs)
        # From inside a plain iteration, or from a signal's handler.
        if self._owner == threading.get_ident() or _inside_plain_iteration():
            return function(*args, **kwargs)
        if module is None:
            _report_no_core()
        try:
            if module is None or self.options.mode == "eager":
                self.counters.iterations += 1
                return function(*args, **kwargs)
            with self._lock:
                # Everything from the native begin on is inside: an interrupt may come between any two lines.
                try:
                    self._owner = threading.get_ident()
                    self._complete()
                    self._begin(module, (args, kwargs), 1, block=False)
                    result = function(*args, **kwargs)
                    args = kwargs = None  # type: ignore[assignment]  # let go of the batch as the caller would
                    self._end(completed=True)
                except BaseException as error:
                    self._end(completed=False)
                    self._explain_native_access(error)
                    raise
                finally:
                    self._owner = None
                return result
        finally:
            pacer.step_ended()

    def enter(self, levels: int) -> bool:
        """Starts an iteration whose body runs in the caller's frame, `levels` frames above; False: it runs plain."""
        module = native_if_ready()
        inside = self._owner == threading.get_ident() or _inside_plain_iteration()
        if module is None and not inside:
            _report_no_core()
        if module is None or self.options.mode == "eager" or module.active_step() is not None or inside:
            self.counters.iterations += 1
            pacer.step_ended()  # from one beginning to the next is as good as from end to end
            return False
        self._lock.acquire()
        try:
            self._owner = threading.get_ident()
            self._complete()
            if self._begin(module, (), levels + 2, block=True) or self._plain:
                return True
        except BaseException:
            self._end(completed=False)
            self._let_go()
            raise
        self._let_go()
        pacer.step_ended()
        return False

    def leave(self, completed: bool) -> None:
        """Ends an iteration started by `enter`."""
        try:
            self._end(completed)
        finally:
            self._let_go()
            pacer.step_ended()

    def _let_go(self) -> None:
        self._owner = None
        self._lock.release()

    def _nested(self, module: ModuleType, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._owner == threading.get_ident():
            raise ReentrantStepError(self.name)
        return function(*args, **kwargs)  # a step inside another step is part of the outer one

    def _explain_native_access(self, error: BaseException) -> None:
        """Native code outside the dispatcher met a tensor without data: say so, and never let it happen again."""
        if isinstance(error, RuntimeError) and any(text in str(error) for text in NATIVE_ACCESS):
            error.add_note(
                "coexec: native code read a tensor that the graph was still computing. Call coexec.materialize(t) "
                "before handing a tensor to it. This step runs as plain eager PyTorch from now on."
            )
            self.counters.fallbacks["native access"] += 1
            self.policy.settle("native code read a tensor that the graph was still computing")

    # ------------------------------------------------------------------------------------------------ one iteration

    def _begin(self, module: ModuleType, arguments: Any, levels: int, block: bool) -> bool:
        self.counters.iterations += 1
        phase = self.policy.start_iteration()
        self._started_s = time.perf_counter()
        self._plain = phase is Phase.CO_EXECUTION and self._plain_next()
        if self._plain:
            _trial.plain = True
            self._native.ran_plain()
        if phase is Phase.EAGER or self._plain:
            return False
        if self._native is None:
            self._native = new_step(module)
            self._native.name_error = name_the_line
        module.settle_overlaps()  # of other steps: what they left to be done comes before this iteration
        self._started_s, self._stalled_before_s = time.perf_counter(), self._native.stalled_in_calls_s
        self._stance = force_eager()
        if phase is Phase.CO_EXECUTION:
            self._native.begin_coexec(arguments, levels, block, self.options.mode == "lazy", self._may_overlap())
        else:
            self._native.begin_trace(arguments, levels, block)
        return True

    def _plain_next(self) -> bool:
        """Whether this iteration is a plain one although the step co-executes: of a trial, or of a rest."""
        if self.waiting.resting:
            self.waiting.look(*self.segments.jobs())
        return self.waiting.plain_next() or self.benefit.plain_next()

    def _end(self, completed: bool) -> None:
        """Finishes the iteration natively, then learns from it. A kernel's error is raised here.

        Does nothing if no iteration is under way: plain eager, or one that has ended already.
        """
        native = self._native
        if native is None or native.phase == 0:
            self._release()
            self._weigh(completed)
            self._announce()
            self._warn_once()
            return
        pending = False
        try:
            if completed:
                pending = not native.finish()
            else:
                native.abort()
        except BaseException as error:
            ended, completed = completed, False
            self._raised(error, ended)
        finally:
            stalled_s = native.stalled_in_calls_s - self._stalled_before_s
            self._python_s = time.perf_counter() - self._started_s - stalled_s
            self._release()
            if not pending:
                self._learn_or_forget(completed)
            self._announce()
        self._warn_once()

    def _raised(self, error: BaseException, completed: bool) -> None:
        """Raises the error of the iteration's end, unless the step's code is raising it already.

        Where it takes the place of what the step's code raised, eager would not have come to that.
        """
        raising = None if completed else error.__context__
        if raising is not None and same_error(error, raising):
            name_the_line(raising, self._native)
            return
        if raising is not None:
            error.__context__ = raising.__context__
        name_the_line(error, self._native)
        raise error

    def complete(self) -> None:
        """Waits for the graph of a call that returned early (`overlap=True`). A kernel's error is raised here."""
        native = self._native
        if native is not None and native.pending:  # so no iteration is under way: this cannot be the thread of one
            with self._lock:
                self._complete()

    def retire(self) -> None:
        """Nobody will call it again: waits as `complete` does, and leaves nothing under way.

        A call that is running goes on to its end first.
        """
        self._retired = True
        try:
            self.complete()
        finally:
            if self._lock.acquire(blocking=False):
                try:
                    self._abandon()
                finally:
                    self._lock.release()

    def _abandon(self) -> None:
        if self._native is not None:
            self.segments.abandon(self._native)

    def _complete(self) -> None:
        """Under the lock."""
        native = self._native
        if native is None or not native.pending:
            return
        completed = False
        try:
            completed = native.complete()
        except BaseException as error:
            name_the_line(error, native)
            raise
        finally:
            if not native.pending:  # else it was an interrupt, and the graph still runs
                self._learn_or_forget(completed)

    def _may_overlap(self) -> bool:
        """What follows a call from compiled code is compiled code, which looks at memory without asking."""
        if not self.options.overlap or (self._stance is not None and self._stance.inside_compiled_code):
            return False
        watch_compiled_code(_settle_overlaps)
        return True

    def _release(self) -> None:
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.restore()

    def _learn_or_forget(self, completed: bool) -> None:
        try:
            self._learn(completed)
        except BaseException:  # an interrupt half-way: Python's and the native graph may differ, so neither is kept
            self._forget()
            raise
        if self._retired:
            self._abandon()

    def _forget(self) -> None:
        if self._native is not None:
            self._native.stop()
            self._abandon()
        self._native = None
        self.graph = TraceGraph()
        self.segments = SegmentManager(self.options, self.where)
        self.loops = LoopFolder()
        self.policy = PhasePolicy()
        self.benefit = BenefitTrial()
        self.waiting = Waiting()

    def after_fork_in_child(self) -> None:
        """A call of another thread was under way, and that thread is not here: nobody will end it.

        The lock has no owner's name while a call is beginning, or while what returned early is completed.
        """
        if self._owner == threading.get_ident() or not self._lock.locked():
            return
        self._lock, self._owner, self._stance = threading.Lock(), None, None
        if self._native is not None:
            _left_by_other_threads.append(self._native)  # in the middle of an iteration: nothing of it can be ended
            self._native = None
        self._forget()

    def _learn(self, completed: bool) -> None:
        native = self._native
        fallback = native.fallback
        if fallback is not None:
            self.counters.fallbacks[fallback[0]] += 1
            event = self.history.fallback(self.counters.iterations, fallback, native, completed)
            if debug_level() >= 1:
                print(f"coexec: step {self.name}: {event}", file=sys.stderr)
        if not native.has_trace:
            self.counters.co_executed += 1
            self.counters.python_s += self._python_s
            self.policy.co_executed()
            self.segments.after_iteration(native, self.graph)
            self._weigh(completed)
            return
        self.benefit.changed()
        self.waiting.disturbed()
        if fallback is None:
            self.counters.traced += 1
        if native.other_device:
            self._leave_to_eager(native.other_device)
            return
        if fallback is not None and fallback[0] == "too long":
            self.policy.give_up("one call of it does more than a million operations")
            return
        trace = native.trace()
        result = merge(self.graph, trace)
        if debug_level() >= 2:
            check_trace(trace)
            check_graph(self.graph)
        if not result.covered:
            self._note_news(result)
        if self.loops.learn(trace, not result.covered, native):
            self._start_anew(native)
            return
        native.extend(list(result.nodes))
        # A fallback that taught nothing is a disagreement between matching and merging: it must not repeat for ever.
        seconds = time.perf_counter() - self._started_s
        share = 1.0 if result.covered else result.share_new
        self.policy.learned(not result.covered or _diverged(fallback), completed, seconds, share)
        if len(self.graph.nodes) > MAX_NODES:
            self.policy.give_up(f"its graph has grown beyond {MAX_NODES} operations: it hardly ever repeats itself")
        if not result.covered:
            self.segments.graph_changed()

    def _start_anew(self, native: Any) -> None:
        """Loops were folded: the next iterations are traced into a new graph."""
        self.segments.abandon(native)
        self.graph = TraceGraph()
        self.segments = SegmentManager(self.options, self.where)
        self.policy.start_anew()

    def _note_news(self, result: MergeResult) -> None:
        """Remembers where this iteration first did what the graph did not know."""
        first = first_news(result)
        if first is not None and self.graph.traces > 1:  # all of the first trace is new
            node = self.graph.nodes[first]
            self.history.new_path(node.op, self._native.chain(node.location))

    def _weigh(self, completed: bool) -> None:
        """Takes a plain or a co-executed iteration into the comparison of both."""
        plain, self._plain = self._plain, False
        if plain:
            _trial.plain = False
        if not completed:
            return
        if self.policy.phase is Phase.EAGER:
            self.policy.rested(time.perf_counter() - self._started_s)
        if self.policy.phase is not Phase.CO_EXECUTION or self.options.mode == "lazy" or self.options.overlap:
            return
        if settings().keep:
            self.benefit.changed()
            self.waiting.disturbed()
        else:
            self._compare(plain, time.perf_counter() - self._started_s)

    def _compare(self, plain: bool, seconds: float) -> None:
        """Is co-execution worth it: so far, while segments are compiled, or at all."""
        self.waiting.ended(plain, seconds, self.segments.only_compiling())
        if self.segments.changing():
            self.benefit.changed()
        elif self.benefit.ended(plain, seconds):
            self.policy.not_worth_it()

    def _announce(self) -> None:
        """Says on stderr what the next call does if that has changed, for those who want to know."""
        before, self._announced = self._announced, self._next_phase()
        if self._announced is not before and debug_level() >= 1:
            print(f"coexec: step {self.name}: {before.value} -> {self._announced.value}", file=sys.stderr)

    def _warn_once(self) -> None:
        """Outside of what a filter that makes it an error could leave half done."""
        text, self._warning = self._warning, ""
        if text:
            warnings.warn(text, stacklevel=5)  # _warn_once, _end, call or leave, the public method, its caller

    def _leave_to_eager(self, device: str) -> None:
        """Co-execution knows the CPU; each op on another device would cost a wait and gain nothing."""
        self.counters.fallbacks[f"device {device}"] += 1
        self.policy.settle(f"it works on {device} tensors, and co-execution is for CPU tensors")
        self._warning = (
            f"coexec: the step {self.name!r} works on {device} tensors, and co-execution on CPU tensors only: the step "
            f"runs as plain eager PyTorch from now on."
        )

    def wait_compiled(self, timeout_s: float) -> bool:
        """As CoExecutable.wait_compiled."""
        deadline_s = time.monotonic() + timeout_s
        if not wait_for_native(timeout_s):
            return False
        self.complete()
        return wait_compiled(self.segments, max(0.0, deadline_s - time.monotonic()))

    # ------------------------------------------------------------------------------------------------------ asking why

    def waits(self) -> list[Waited]:
        """Returns where Python waited for the graph, the longest first."""
        return waits_of(self._native.waits()) if self._native is not None else []

    def wait_counts(self) -> dict[str, int]:
        """Returns how often Python waited for the graph, by reason; a fallback is counted as such, and not here."""
        counts: Counter[str] = Counter()
        for wait in self.waits():
            if wait.reason != "fallback":
                counts[wait.reason] += wait.count
        return counts

    def graph_waits(self) -> dict[str, int]:
        """Returns how often the graph waited for Python to choose its way, by reason."""
        waits: dict[str, int] = self._native.stats()["graph_waits"] if self._native is not None else {}
        return waits

    def loop_lines(self) -> list[str]:
        """Returns a line per While node of the plan: where it is, and how much is in it."""
        plan = self.segments.plan
        if plan is None or self._native is None:
            return []
        return [self._loop_line(plan, loop) for loop in plan.loops]

    def recorded_calls(self) -> list[Any]:
        """Returns what both runners did in the latest co-executed calls, see `runtime.timeline`."""
        return self._native.timeline() if self._native is not None else []

    def line_of(self, node: Node) -> str:
        """Returns the user's line of an op of the graph."""
        return user_line(self._native.chain(node.location))

    def _loop_line(self, plan: Plan, loop: While) -> str:
        nodes = [node for block in loop.blocks for node in plan.blocks[block].nodes]
        begins = self.graph.nodes[loop.back_edges[0][1]]
        passes = sum(self.graph.edge_visits[edge] for edge in loop.back_edges)
        nested = f" in loop {loop.parent}" if loop.parent >= 0 else ""
        place = self.line_of(begins)
        return f"loop {loop.id}{nested} at {place}: {len(nodes)} ops, replayed; {passes} more passes in the traces"

    def graph_view(self) -> Any:
        """Returns the TraceGraph, printable."""
        return GraphView(self.graph)

    def phase(self) -> Phase:
        """Returns what the next call will do."""
        if disabled():
            return Phase.EAGER
        if native_if_ready() is None:
            return Phase.EAGER if native_error() is not None else Phase.BUILDING
        return Phase.EAGER if self.options.mode == "eager" else self._next_phase()

    def _next_phase(self) -> Phase:
        return Phase.EAGER if self.rests() else self.policy.phase

    def rests(self) -> bool:
        """Returns whether the step waits in plain eager for its compiled code."""
        return self.policy.phase is Phase.CO_EXECUTION and self.waiting.resting

    def stats(self) -> StepStats:
        """Returns a snapshot of the counters, of all calls to their end."""
        self.complete()
        native: dict[str, Any] = self._native.stats() if self._native is not None else {}
        return StepStats(
            phase=self.phase().value,
            iterations=self.counters.iterations,
            traced=self.counters.traced,
            co_executed=self.counters.co_executed,
            fallbacks=dict(self.counters.fallbacks),
            segments=self.segments.by_executor(),
            switches=self.segments.switches(),
            loops=self.segments.loops(),
            feeds=native.get("feeds", 0),
            fetches=native.get("fetches", 0),
            returned_early=native.get("returned_early", 0),
            python_exec_s=self.counters.python_s,
            python_stall_s=native.get("python_stall_s", 0.0),
            graph_exec_s=native.get("graph_exec_s", 0.0),
            graph_stall_s=native.get("graph_stall_s", 0.0),
        )
