"""Timing by turns: which of several contenders is faster, by how much, and how sure that is.

The contenders take turns in rounds, and a ratio is taken within a round, so that what slows the machine for a while
slows both sides of it. A contender that runs in the same process as another disturbs it (two thread pools spin against
each other), so benchmarks of whole steps give each contender a process of its own (examples/demo/child.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

BLOCK_S = 0.02  # a turn lasts at least this long: below it, clock and wake-up noise would be a percent and more
SHORT_STEP_S = 0.002  # steps below this are timed as one block, not one by one
RESAMPLES = 4000


class Contender(Protocol):
    """Something that can run steps."""

    name: str

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        """Runs `lead_in` steps uncounted and `steps` counted; returns seconds per counted step.

        Args:
            one_by_one: return the median of the steps' times instead of the block's time by its length.
        """


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster `name` is than `reference`: the median over rounds of reference / name."""

    name: str
    reference: str
    median: float
    low: float  # 95% bootstrap interval of the median
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Paired:
    """All rounds of one comparison; `seconds[name][round]` is seconds per step."""

    seconds: dict[str, list[float]]
    block_steps: dict[str, int]

    def median_s(self, name: str) -> float:
        """Returns the median over the rounds of `name`'s seconds per step."""
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, reference: str) -> Ratio:
        """Returns how many times faster `name` is than `reference`."""
        ratios = np.asarray(self.seconds[reference]) / np.asarray(self.seconds[name])
        low, high = bootstrap_interval(ratios)
        return Ratio(name, reference, float(np.median(ratios)), low, high)

    def as_json(self, reference: str) -> dict[str, Any]:
        """Returns medians, spreads and the ratios to `reference` as plain data."""
        return {
            name: {
                "median_ms": self.median_s(name) * 1e3,
                "quartiles_ms": [float(q) * 1e3 for q in np.quantile(values, (0.25, 0.75))],
                "rounds": len(values),
                "steps_per_turn": self.block_steps[name],
                "speedup": asdict(self.ratio(name, reference)),
            }
            for name, values in self.seconds.items()
        }


def time_by_turns(contenders: Sequence[Contender], rounds: int) -> Paired:
    """Times the contenders, which have been warmed up, in `rounds` rounds; who begins changes from round to round."""
    plans = {contender.name: plan_block(contender) for contender in contenders}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            steps, one_by_one = plans[contender.name]
            seconds[contender.name].append(contender.run_block(lead_in_of(steps), steps, one_by_one))
    return Paired(seconds, {name: steps for name, (steps, _) in plans.items()})


def plan_block(contender: Contender) -> tuple[int, bool]:
    """Returns how many steps a turn has, and whether they are timed one by one."""
    step_s = contender.run_block(2, 3, True)
    steps = max(3, math.ceil(BLOCK_S / step_s))
    return steps, step_s >= SHORT_STEP_S


def lead_in_of(steps: int) -> int:
    """Returns how many uncounted steps begin a turn: they wake threads and fill caches."""
    return max(1, steps // 5)


def bootstrap_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval of the median of `values` by the percentile bootstrap (seeded: same data, same interval)."""
    generator = np.random.default_rng(0)
    samples = generator.choice(values, size=(RESAMPLES, len(values)), replace=True)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(np.median(samples, axis=1), (tail, 1.0 - tail))
    return float(low), float(high)
