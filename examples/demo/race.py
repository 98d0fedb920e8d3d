"""Trains one program in all variants: each alone until it is warm, then by turns, so that times can be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np

from examples.demo.child import ChildFailed, ChildRunner
from examples.demo.variants import Unavailable

FIRST_STEPS = 10  # before the native core is waited for
WARMUP_STEPS = 60  # these included; before the compiled segments are waited for
SETTLE_STEPS = 20  # after background compilation has finished, so that its result is adopted
COMPILE_TIMEOUT_S = 150.0
# A turn is a few steps of one variant. Its first step is not counted: it wakes threads and fills caches that the
# other variants' turns have put to sleep and emptied.
TURN_STEPS = 5
FAST_FACTOR = 1.2  # a warm-up step is "fast" within this factor of what the variant gets at last ...
FAST_RUN = 3  # ... if this many steps in a row are


class Contender(Protocol):
    """One program in one variant: in this process (variants.Runner) or in one of its own (child.ChildRunner)."""

    def run_steps(self, steps: int) -> Iterator[tuple[float, float]]:
        """Yields the loss and the seconds of each step."""

    def stats(self) -> Any: ...
    def explain(self) -> str: ...
    def wait_native(self, timeout_s: float) -> None: ...
    def wait_compiled(self, timeout_s: float) -> bool: ...
    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parameters before the first step and now, float64[n]."""

    def close(self) -> object: ...


@dataclass
class Lane:
    """One variant's run: what was measured, or why there is nothing."""

    variant: str
    runner: Contender | None = None
    problem: str = ""  # why the variant is not running (any more)
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # of every step, the warm-up included
    ended_s: list[float] = field(default_factory=list)  # of every warm-up step: when it ended, from the first call
    paired_s: list[float] = field(default_factory=list)  # of the counted steps of the turns
    stats: Any = None  # coexec's CoExecutable.stats()
    explanation: str = ""
    parameters: tuple[np.ndarray, np.ndarray] | None = None  # before the first step and at the end, float64[n]

    @property
    def median_s(self) -> float | None:
        """Median duration of a step in the turns, or None if there were none."""
        return median(self.paired_s) if self.paired_s else None

    def fail(self, problem: str) -> None:
        """Ends the lane: what was measured so far stays."""
        self.problem, self.runner = problem, None

    def run(self, steps: int, started_s: float | None = None, counted: bool = False) -> None:
        """Runs `steps` steps. An exception ends the lane, not the demo.

        Args:
            started_s: when the warm-up began, or None if this is not the warm-up.
            counted: the steps are a turn, whose steps but the first are kept for the median.
        """
        if self.runner is None:
            return
        try:
            for index, (loss, duration_s) in enumerate(self.runner.run_steps(steps)):
                self.losses.append(loss)
                self.times_s.append(duration_s)
                if started_s is not None:
                    self.ended_s.append(time.perf_counter() - started_s)
                if counted and index > 0:
                    self.paired_s.append(duration_s)
        except Exception as error:
            self.fail(f"step {len(self.losses) + 1}: {one_line(error)}")

    def first_fast_s(self) -> float | None:
        """Seconds from the first call to the end of the first step that is as fast as the variant gets, or None."""
        if self.median_s is None:
            return None
        settled_s = median(self.times_s[: len(self.ended_s)][-SETTLE_STEPS:])  # the machine may have been busier then
        limit_s = FAST_FACTOR * max(self.median_s, settled_s)
        fast = [duration_s <= limit_s for duration_s in self.times_s[: len(self.ended_s)]]
        for index in range(len(fast) - FAST_RUN + 1):
            if all(fast[index : index + FAST_RUN]):
                return self.ended_s[index]
        return None

    def parameter_distance(self, reference: Lane) -> float | None:
        """How far the parameters are from `reference`'s, as a share of the way that training moved those."""
        if self.parameters is None or reference.parameters is None:
            return None
        (_, ours), (start, theirs) = self.parameters, reference.parameters
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - start))

    def finish(self) -> None:
        """Reads what the variant says about itself and its parameters, and lets go of it."""
        runner, self.runner = self.runner, None
        if runner is None:
            return
        try:
            self.stats, self.explanation, self.parameters = runner.stats(), runner.explain(), runner.parameters()
            runner.close()
        except Exception as error:
            self.fail(f"at the end: {one_line(error)}")


@dataclass
class Race:
    """All lanes of one program."""

    program: str
    lanes: list[Lane]
    steps: int


def run_race(
    program: str,
    names: list[str],
    steps: int,
    on_progress: Callable[[str, int], None],
    make: Callable[[str, str, int], Contender] = ChildRunner,
) -> Race:
    """Trains `program` for `steps` steps in each of the variants `names`.

    Args:
        make: builds a contender from program, variant and steps. A process of its own for each is the default: a
            second OpenMP pool in a process slows every variant in it, eager up to twice.
        on_progress: called with what is going on and how many steps (of all lanes together) have been done since
            the last call.
    """
    lanes = [open_lane(program, name, steps, make) for name in names]
    for lane in lanes:
        warm_up(lane, on_progress)
    take_turns(lanes, steps - WARMUP_STEPS - SETTLE_STEPS, on_progress)
    for lane in lanes:
        lane.finish()
    return Race(program, lanes, steps)


def open_lane(program: str, name: str, steps: int, make: Callable[[str, str, int], Contender]) -> Lane:
    """Builds one variant; a variant that cannot be built is a lane that says why."""
    try:
        return Lane(name, make(program, name, steps))
    except Unavailable as error:
        return Lane(name, problem=f"not available: {error}")
    except Exception as error:
        return Lane(name, problem=one_line(error))


def one_line(error: Exception) -> str:
    """Returns an exception's type and the first line of its text; a child's words say its type already."""
    if isinstance(error, ChildFailed):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def warm_up(lane: Lane, on_progress: Callable[[str, int], None]) -> None:
    """Runs one lane alone; what coexec compiles in the background is waited for, and its time counts."""
    started_s = time.perf_counter()
    stages = [("first steps", FIRST_STEPS), ("warming up", WARMUP_STEPS - FIRST_STEPS), ("settling", SETTLE_STEPS)]
    for what, steps in stages:
        for _ in range(steps):
            lane.run(1, started_s)
            on_progress(f"{lane.variant}: {what}", 1)
        if what != "settling" and lane.runner is not None:
            on_progress(f"{lane.variant}: waiting for the compiler", 0)
            wait_for_compiler(lane, lane.runner)


def wait_for_compiler(lane: Lane, runner: Contender) -> None:
    """Waits until the native core is there and background compilation of what is known so far has finished."""
    try:
        runner.wait_native(COMPILE_TIMEOUT_S)
        runner.wait_compiled(COMPILE_TIMEOUT_S)
    except Exception as error:
        lane.fail(f"waiting for the compiler: {one_line(error)}")


def take_turns(lanes: list[Lane], steps: int, on_progress: Callable[[str, int], None]) -> None:
    """Runs `steps` steps of every lane in short turns; who begins changes from round to round."""
    rounds = [TURN_STEPS] * (steps // TURN_STEPS) + ([steps % TURN_STEPS] if steps % TURN_STEPS else [])
    for number, length in enumerate(rounds):
        first = number % len(lanes)
        for lane in lanes[first:] + lanes[:first]:
            lane.run(length, counted=True)
            on_progress("by turns", length)
