"""The statistics of timing by turns, on contenders whose times are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from coexec.tuning.turns import MIN_CALLS, bootstrap_interval, plan_block, time_by_turns, time_together, timing_of


class Clock:
    """A contender that says how long it takes; both of a pair share a log of turns."""

    def __init__(self, name: str, seconds: Callable[[int], float], log: list[str]) -> None:
        self.name, self.seconds, self.log, self.turns = name, seconds, log, 0

    def run_block(self, lead_in: int, calls: int, one_by_one: bool) -> float:
        self.turns += 1
        self.log.append(self.name)
        return self.seconds(self.turns)


def test_who_begins_alternates() -> None:
    log: list[str] = []
    time_by_turns(Clock("e", lambda _: 1.0, log), Clock("c", lambda _: 1.0, log), rounds=(4, 4))
    assert log[2:] == ["e", "c", "c", "e", "e", "c", "c", "e"]  # the first two plan


def test_a_slow_phase_of_the_machine_does_not_change_the_ratio() -> None:
    log: list[str] = []

    def slow_later(base: float) -> Callable[[int], float]:
        return lambda turn: base * (10.0 if turn > 5 else 1.0)

    timing = time_by_turns(Clock("e", slow_later(0.02), log), Clock("c", slow_later(0.01), log), rounds=(9, 9))
    assert timing.ratio == 2.0
    assert (timing.low, timing.high) == (2.0, 2.0)
    assert timing.faster


def test_it_stops_as_soon_as_it_is_clear() -> None:
    log: list[str] = []
    timing = time_by_turns(Clock("e", lambda _: 3.0, log), Clock("c", lambda _: 1.0, log), rounds=(5, 50))
    assert timing.rounds == 5
    noise = random.Random(3)
    noisy = Clock("c", lambda _: noise.uniform(0.8, 1.25), [])
    assert time_by_turns(Clock("e", lambda _: 1.0, []), noisy, rounds=(5, 20)).rounds > 5


def test_all_run_in_the_same_rounds_and_the_beaten_leave() -> None:
    log: list[str] = []
    noise = random.Random(5)
    near = [Clock(name, lambda _: noise.uniform(0.98, 1.02), log) for name in ("a", "b")]
    behind, far = Clock("behind", lambda _: noise.uniform(1.15, 1.19), log), Clock("far", lambda _: 5.0, log)
    timings = time_together(Clock("e", lambda _: 2.0, log), [far, near[0], behind, near[1]], rounds=(6, 12))
    assert [timing.rounds for timing in timings] == [3, 12, 6, 12]
    assert timings[0].ratio == 0.4
    assert timings[1].ratio == pytest.approx(2.0, rel=0.03)
    starts = [log[5:][i] for i in (0, 5, 10)]  # the first five plan
    assert starts == ["e", "far", "a"]  # who begins changes


def test_a_leader_alone_ends_it() -> None:
    log: list[str] = []
    clocks = [Clock("fast", lambda _: 1.0, log), Clock("slow", lambda _: 1.1, log)]
    timings = time_together(Clock("e", lambda _: 2.0, log), clocks, rounds=(5, 50))
    assert [timing.rounds for timing in timings] == [5, 5]


def test_within_a_percent_eager_stays() -> None:
    assert not timing_of([1.009] * 9, [1.0] * 9).faster
    assert timing_of([1.02] * 9, [1.0] * 9).faster


def test_a_lucky_median_is_not_enough() -> None:
    ratios = [0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4]
    timing = timing_of(ratios, [1.0] * len(ratios))
    assert timing.ratio > 1.01
    assert timing.low < 1.0
    assert not timing.faster


def test_a_turn_is_long_enough_to_be_timed() -> None:
    assert plan_block(Clock("c", lambda _: 0.5, [])) == (MIN_CALLS, True)
    calls, one_by_one = plan_block(Clock("c", lambda _: 1e-5, []))
    assert calls * 1e-5 >= 0.02
    assert not one_by_one


def test_the_same_data_give_the_same_interval() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.05]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    low, high = bootstrap_interval(values)
    assert low <= 1.05 <= high
