"""Is co-execution worth it here? Measured on the user's own iterations, so that coexec is never slower than leaving it
off: once a step has settled, a few plain eager iterations take turns with co-executed ones. No torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

SETTLED_ITERATIONS = 64  # co-executed ones without a change, before the trial
BLOCK = 4  # iterations of one kind; the first is not counted: it wakes threads that the other kind had put to sleep
BLOCKS = 8
MARGIN = 1.03  # co-execution stays unless it is slower by more: below, the clock of a shared machine decides


@dataclass(slots=True)
class BenefitTrial:
    """The trials of one step: says which iterations run plain, and what came of it."""

    settled: int = 0
    wait: int = SETTLED_ITERATIONS  # doubled after each trial that co-execution has won
    turn: int = 0  # iterations of the trial under way that have ended
    eager_s: list[float] = field(default_factory=list)
    coexec_s: list[float] = field(default_factory=list)
    verdict: str = ""  # of the last trial, for people

    def changed(self) -> None:
        """The graph or its executors are no longer what they were."""
        self.settled = 0
        self._forget()

    def plain_next(self) -> bool:
        """Whether the next iteration is a plain eager one of a trial."""
        return self.settled >= self.wait and (self.turn // BLOCK) % 2 == 1

    def ended(self, plain: bool, seconds: float) -> bool:
        """An iteration ended normally. Returns whether a trial just found eager to be faster.

        Args:
            plain: it was a plain eager one.
            seconds: how long the call took.
        """
        if self.settled < self.wait:
            self.settled += 1
            return False
        if self.turn % BLOCK:
            (self.eager_s if plain else self.coexec_s).append(seconds)
        self.turn += 1
        return self.turn == BLOCK * BLOCKS and self._judge()

    def _judge(self) -> bool:
        eager_s, coexec_s = quartile(self.eager_s), quartile(self.coexec_s)
        slower = coexec_s > MARGIN * eager_s
        self.verdict = (
            f"co-execution took {coexec_s * 1e3:.3f} ms, plain eager {eager_s * 1e3:.3f} ms "
            f"({eager_s / coexec_s:.2f}x), by turns in this step"
        )
        self.wait = SETTLED_ITERATIONS if slower else 2 * self.wait
        self.changed()
        return slower

    def _forget(self) -> None:
        self.turn = 0
        self.eager_s.clear()
        self.coexec_s.clear()


def quartile(seconds: list[float]) -> float:
    """The lower quartile: what other processes do to an iteration only ever makes it longer."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]
