"""The statistics behind every figure, on contenders whose speed is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.bench_soak import growth
from benchmarks.paired import bootstrap_interval, plan_block, time_by_turns


class Scripted:
    """A contender whose step takes what `step_s` says; it keeps the order in which contenders ran."""

    def __init__(self, name: str, step_s: Callable[[], float], log: list[str]) -> None:
        self.name, self._step_s, self._log = name, step_s, log

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        assert lead_in >= 1
        assert steps >= 3
        self._log.append(self.name)
        return self._step_s()


def test_ratio_is_taken_within_rounds_so_that_drift_cancels() -> None:
    log: list[str] = []
    drift = iter(np.repeat(np.linspace(1.0, 5.0, 21), 2))  # the machine gets five times slower
    now = {"factor": 1.0}

    def slow() -> float:
        now["factor"] = next(drift, 5.0)
        return 0.030 * now["factor"]

    def fast() -> float:
        return 0.010 * next(drift, 5.0)

    paired = time_by_turns([Scripted("slow", slow, log), Scripted("fast", fast, log)], rounds=20)
    ratio = paired.ratio("fast", "slow")
    assert ratio.median == pytest.approx(3.0, rel=0.05)
    assert ratio.low <= ratio.median <= ratio.high
    assert paired.as_json("slow")["slow"]["speedup"]["median"] == 1.0


def test_whoever_begins_changes_from_round_to_round() -> None:
    log: list[str] = []
    contenders = [Scripted(name, lambda: 0.01, log) for name in "abc"]
    time_by_turns(contenders, rounds=3)
    assert "".join(log[3:]) == "abcbcacab"  # the first three calls plan the blocks


@pytest.mark.parametrize(("step_s", "steps", "one_by_one"), [(0.0001, 200, False), (0.004, 5, True), (0.5, 3, True)])
def test_short_steps_are_timed_in_blocks(step_s: float, steps: int, one_by_one: bool) -> None:
    assert plan_block(Scripted("a", lambda: step_s, [])) == (steps, one_by_one)


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        low, high = bootstrap_interval(generator.normal(1.0, 0.1, size=30))
        covered += low <= 1.0 <= high
    assert 88 <= covered <= 100
    low, high = bootstrap_interval(np.full(10, 2.0))
    assert (low, high) == (2.0, 2.0)


def test_growth_is_the_slope_of_the_second_half() -> None:
    settled = [10_000_000 * n for n in range(10)] + [100_000_000] * 10  # grows while it warms up, then stays
    assert growth(settled) == pytest.approx(0.0, abs=1.0)
    leaking = [100_000_000 + 1_000 * n for n in range(20)]  # 1,000 bytes per 100 steps
    assert growth(leaking) == pytest.approx(10_000.0)
