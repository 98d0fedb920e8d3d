"""Is co-execution worth it here? Measured on the user's own iterations, so that coexec is never slower than leaving it
off: once a step has settled, a few plain eager iterations take turns with co-executed ones. What it does until then,
while its segments are compiled: :mod:`coexec.runtime.waiting`. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

SETTLED_ITERATIONS = 64  # co-executed ones without a change, before the trial
BLOCK = 4  # iterations of one kind; the first is not counted: it wakes threads that the other kind had put to sleep
BLOCKS = 8
MARGIN = 1.03  # co-execution stays unless it is slower by more: below, the clock of a shared machine decides


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of an iteration of either kind."""

    coexec_s: float
    eager_s: float

    @property
    def slower(self) -> bool:
        """Whether plain eager is clearly faster."""
        return self.coexec_s > MARGIN * self.eager_s

    def __str__(self) -> str:
        return f"co-execution took {self.coexec_s * 1e3:.3f} ms, plain eager {self.eager_s * 1e3:.3f} ms"


@dataclass(slots=True)
class Turns:
    """Blocks of co-executed and of plain eager iterations by turns, so that both meet the same machine."""

    blocks: int = BLOCKS
    turn: int = 0  # iterations that have ended
    eager_s: list[float] = field(default_factory=list)
    coexec_s: list[float] = field(default_factory=list)

    def plain_next(self) -> bool:
        """Whether the next iteration is a plain eager one."""
        return (self.turn // BLOCK) % 2 == 1

    def ended(self, plain: bool, seconds: float) -> Comparison | None:
        """An iteration ended. Returns what came of them all once it was the last one; then the turns can begin anew."""
        if self.turn % BLOCK:
            (self.eager_s if plain else self.coexec_s).append(seconds)
        self.turn += 1
        if self.turn < BLOCK * self.blocks:
            return None
        comparison = Comparison(quartile(self.coexec_s), quartile(self.eager_s))
        self.forget()
        return comparison

    def forget(self) -> None:
        """They begin anew."""
        self.turn = 0
        self.eager_s.clear()
        self.coexec_s.clear()


@dataclass(slots=True)
class BenefitTrial:
    """The trials of one settled step: says which iterations run plain, and what came of it."""

    settled: int = 0
    wait: int = SETTLED_ITERATIONS  # doubled after each trial that co-execution has won
    turns: Turns = field(default_factory=Turns)
    verdict: str = ""  # of the last trial, for people

    def changed(self) -> None:
        """The graph or its executors are no longer what they were."""
        self.settled = 0
        self.turns.forget()

    def plain_next(self) -> bool:
        """Whether the next iteration is a plain eager one of a trial."""
        return self.settled >= self.wait and self.turns.plain_next()

    def ended(self, plain: bool, seconds: float) -> bool:
        """An iteration ended normally. Returns whether a trial just found eager to be faster.

        Args:
            plain: it was a plain eager one.
            seconds: how long the call took.
        """
        if self.settled < self.wait:
            self.settled += 1
            return False
        result = self.turns.ended(plain, seconds)
        return result is not None and self._judge(result)

    def _judge(self, result: Comparison) -> bool:
        self.verdict = f"{result} ({result.eager_s / result.coexec_s:.2f}x), by turns in this step"
        self.wait = SETTLED_ITERATIONS if result.slower else 2 * self.wait
        self.changed()
        return result.slower


def quartile(seconds: Collection[float]) -> float:
    """The lower quartile: what other processes do to an iteration only ever makes it longer."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]
