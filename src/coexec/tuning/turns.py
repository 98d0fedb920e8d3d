"""Timing by turns: eager and a candidate, each in a process of its own, one of them running at a time.

A ratio is taken within a round, so what slows the machine for a while slows both sides of it. Two thread pools inside
one process disturb each other (a spinning one falsified a ratio threefold), and so would an idle process whose threads
still spin: whoever does not have the turn is stopped by a signal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Protocol

TURN_S = 0.02
"""A turn lasts at least this long: below it, clock and wake-up noise would be a percent and more."""

SHORT_CALL_S = 0.002
"""Calls below this are timed as one block, not one by one."""

MIN_CALLS = 3
FIRST_LOOK = 3
"""Rounds after which those are dropped that cannot win."""

FAR_BEHIND = 1.25
"""How many times slower than the slowest round of the leader one's fastest round must be."""

RESAMPLES = 1000
TIE = 1.01
"""A candidate must be faster than this, or eager stays: within a percent nothing is known, and eager needs no files."""


class Contender(Protocol):
    """Something that can be timed."""

    def run_block(self, lead_in: int, calls: int, one_by_one: bool) -> float:
        """Make `lead_in` calls uncounted, then `calls` counted ones; return seconds per counted call.

        `one_by_one`: the median of the calls' times instead of the block's time by its length.
        """


@dataclass(frozen=True, slots=True)
class Timing:
    """Eager and one candidate over all rounds. Seconds are per call."""

    eager_s: float  # median over rounds
    candidate_s: float
    spread_s: float  # interquartile range of the candidate's rounds
    ratio: float  # median over rounds of eager / candidate: above 1 the candidate is faster
    low: float  # 95% bootstrap interval of the ratio
    high: float
    rounds: int

    @property
    def faster(self) -> bool:
        """The candidate is faster than eager for sure, and by more than a tie."""
        return self.ratio > TIE and self.low > 1.0

    @property
    def slower(self) -> bool:
        """The candidate is no faster than a tie for sure."""
        return self.high < TIE

    def __str__(self) -> str:
        return self.against("eager")

    def against(self, name: str) -> str:
        """In words, where `name` is what the candidate was timed against."""
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}] of {name}'s {self.eager_s * 1e3:.3f} ms"


def time_by_turns(
    eager: Contender,
    candidate: Contender,
    *,
    rounds: tuple[int, int] = (9, 27),
    enough: Callable[[], bool] = lambda: False,
) -> Timing:
    """Time both in turns; who begins alternates.

    Args:
        rounds: the fewest and the most. It stops in between as soon as it is clear who is faster.
        enough: asked after the fewest rounds: no time is left.
    """
    (timing,) = time_together(eager, [candidate], rounds=rounds, enough=enough)
    return timing


def time_together(
    eager: Contender,
    candidates: Sequence[Contender],
    *,
    rounds: tuple[int, int] = (9, 27),
    enough: Callable[[], bool] = lambda: False,
) -> list[Timing]:
    """Time all in turns; who begins changes from round to round.

    As in a tournament, who is out of the running takes no more turns: after three rounds one that was far behind in
    each of them, after the fewest rounds whoever is slower than eager or than the leader for sure. So the winner is
    found by the same rounds that the others ran in, and most rounds are spent between those that are close.
    """
    contenders = [eager, *candidates]
    plans = [plan_block(contender) for contender in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    running = list(range(1, len(contenders)))
    for number in range(rounds[1]):
        order = [0, *running]
        first = number % len(order)
        for side in order[first:] + order[:first]:
            calls, one_by_one = plans[side]
            seconds[side].append(contenders[side].run_block(_lead_in(calls), calls, one_by_one))
        if number + 1 >= rounds[0]:
            if number + 1 == rounds[1] or enough() or _is_decided(seconds, running):
                break
            running = [side for side in running if not _is_beaten(seconds, side, running)]
        elif number + 1 == FIRST_LOOK:
            running = [side for side in running if not _is_far_behind(seconds, side, running)]
    return [timing_of(seconds[0][: len(own)], own) for own in seconds[1:]]


def plan_block(contender: Contender) -> tuple[int, bool]:
    """How many calls a turn has, and whether they are timed one by one. Warms up on the way."""
    call_s = max(contender.run_block(3, 3, True), 1e-7)
    return max(MIN_CALLS, math.ceil(TURN_S / call_s)), call_s >= SHORT_CALL_S


def timing_of(eager: Sequence[float], candidate: Sequence[float]) -> Timing:
    """Statistics of paired rounds."""
    ratios = [e / c for e, c in zip(eager, candidate, strict=True)]
    low, high = bootstrap_interval(ratios)
    quarters = quantiles(candidate, n=4) if len(candidate) > 1 else [candidate[0]] * 3
    return Timing(
        eager_s=median(eager),
        candidate_s=median(candidate),
        spread_s=quarters[2] - quarters[0],
        ratio=median(ratios),
        low=low,
        high=high,
        rounds=len(ratios),
    )


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Interval of the median of `values` by the percentile bootstrap; seeded, so same data give the same interval."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1.0 - level) / 2.0
    return medians[int(tail * RESAMPLES)], medians[int((1.0 - tail) * RESAMPLES) - 1]


def _is_decided(seconds: Sequence[Sequence[float]], running: Sequence[int]) -> bool:
    """Nobody but the leader is in the running, and whether it beats eager is clear."""
    leader = _leader(seconds, running)
    others = [side for side in running if side != leader]
    return _is_clear(_over(seconds, 0, leader)) and all(_is_beaten(seconds, side, running) for side in others)


def _is_beaten(seconds: Sequence[Sequence[float]], side: int, running: Sequence[int]) -> bool:
    """Slower than the leader for sure: by the interval of the ratio between these two. The leader never is."""
    leader = _leader(seconds, running)
    return side != leader and _over(seconds, side, leader).low > 1.0


def _is_far_behind(seconds: Sequence[Sequence[float]], side: int, running: Sequence[int]) -> bool:
    return min(seconds[side]) > FAR_BEHIND * max(seconds[_leader(seconds, running)])


def _leader(seconds: Sequence[Sequence[float]], running: Sequence[int]) -> int:
    return min(running, key=lambda side: median(seconds[side]))


def _over(seconds: Sequence[Sequence[float]], slow: int, fast: int) -> Timing:
    return timing_of(seconds[slow], seconds[fast])


def _is_clear(timing: Timing) -> bool:
    return timing.low > 1.0 + 2 * (TIE - 1.0) or timing.slower


def _lead_in(calls: int) -> int:
    """Uncounted calls that begin a turn: they wake threads and fill caches."""
    return max(1, calls // 5)
