"""Where a step waits while its segments are compiled: in co-execution, on replay, or in plain eager if that is faster.

    undisturbed -> by turns with plain eager -> lost -> rest -> visit to co-execution -> lost -> a longer rest ...
                                             -> won: asked again later                -> won: by turns again later

Compiling can take minutes, and steps with much Python are two to three times slower on replay. A rest is plain eager,
and ends when something was compiled, or by itself: only co-executed iterations adopt code, and describe and capture
what is still to be compiled. Once nothing is compiled any more, :mod:`coexec.runtime.benefit` decides. No torch.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from coexec.runtime.benefit import Comparison, Turns, quartile

UNDISTURBED = 16  # co-executed iterations without a trace or a fallback, before the first comparison
BLOCKS = 4  # of a comparison by turns: half of what decides for thousands of iterations, since a rest is soon over
FIRST_REST = 64  # iterations; each rest is twice as long as the one before, up to LONGEST_REST
LONGEST_REST = 1024
LEAST_REST = 16  # iterations before a visit because a part of what is compiled is there
PRICE = 0.1  # what a visit that loses may cost, as a share of the rest before it
WAKING = 4  # iterations of a visit that adopt code and wake threads: not counted
COUNTED = 8  # iterations of a visit that are compared with the rest before it
PLAIN_COUNTED = 16  # the latest plain iterations that a visit is compared with


@dataclass(slots=True)
class Waiting:
    """Says which iterations run plain while segments of the step are being compiled."""

    undisturbed: int = 0  # co-executed iterations since a trace, a fallback, a comparison or a rest
    wait: int = UNDISTURBED  # so many before the next comparison, and before a visit's iterations count
    turns: Turns = field(default_factory=lambda: Turns(BLOCKS))
    latest: Comparison | None = None
    lost: bool = False  # the latest comparison: plain eager was faster
    left: int = 0  # iterations of the rest under way
    rested: int = 0  # iterations of it that have ended
    next_rest: int = FIRST_REST
    next_turns: int = UNDISTURBED  # `wait` once co-execution has won; doubled each time that it wins by turns
    stint: int = 0  # co-executed iterations since a trace, a fallback, a comparison or a rest, those of turns included
    stint_s: float = 0.0  # what they took; those that describe, capture and adopt take much longer
    coexec_s: deque[float] = field(default_factory=lambda: deque(maxlen=COUNTED))  # of the visit
    eager_s: deque[float] = field(default_factory=lambda: deque(maxlen=PLAIN_COUNTED))  # of turns and rests

    @property
    def resting(self) -> bool:
        """Whether the next iteration is a plain eager one of a rest."""
        return self.left > 0

    def __str__(self) -> str:
        """What the step does in a rest, and why."""
        return (
            f"runs plain eager until its segments are compiled: {self.latest}; "
            f"co-execution is tried again after {self.left} calls at the latest"
        )

    def plain_next(self) -> bool:
        """Whether the next iteration is a plain eager one."""
        return self.resting or self.turns.plain_next()

    def disturbed(self) -> None:
        """An iteration was traced or fell back: what was measured is not what comes."""
        self.turns.forget()
        self.left = 0
        self._co_execute(self.next_turns)

    def look(self, ended: int, running: int) -> None:
        """Call in a rest, before each iteration: a rest ends when compiled code is there.

        Args:
            ended: how many compilations of the step have ended and can be adopted.
            running: how many have not ended.
        """
        if self.resting and (not running or (ended and self.rested >= self._least_rest())):
            self._visit()

    def ended(self, plain: bool, seconds: float, compiling: bool) -> None:
        """An iteration ended normally.

        Args:
            plain: it was a plain eager one.
            seconds: how long the call took.
            compiling: segments of the step are being compiled, and nothing else about it changes.
        """
        if self.resting:
            self._rest(seconds)
            return
        if not plain:
            self.stint, self.stint_s = self.stint + 1, self.stint_s + seconds
        if not compiling:
            self.turns.forget()
            self._count(plain, seconds)
        elif not self.lost and self.undisturbed >= self.wait:
            self._take_turns(plain, seconds)
        else:
            self._count(plain, seconds)
            self._judge_visit()

    def _rest(self, seconds: float) -> None:
        self.left -= 1
        self.rested += 1
        if self.rested > 1:  # the first wakes threads
            self.eager_s.append(seconds)
        if not self.left:
            self._visit()

    def _visit(self) -> None:
        self.left = 0
        self._co_execute(WAKING)

    def _co_execute(self, wait: int) -> None:
        """Co-execution, from now on; what it takes counts after `wait` iterations."""
        self.undisturbed, self.wait = 0, wait
        self.stint, self.stint_s = 0, 0.0
        self.coexec_s.clear()

    def _count(self, plain: bool, seconds: float) -> None:
        if plain:  # of the trial of a settled step
            return
        self.undisturbed += 1
        if self.undisturbed > self.wait:
            self.coexec_s.append(seconds)

    def _take_turns(self, plain: bool, seconds: float) -> None:
        if plain:
            self.eager_s.append(seconds)
        result = self.turns.ended(plain, seconds)
        if result is not None:
            self.next_turns = min(2 * self.next_turns, LONGEST_REST)
            self._decide(result)

    def _judge_visit(self) -> None:
        """A visit is compared with the rest before it: turns would cost as much again."""
        if self.lost and len(self.coexec_s) == COUNTED:
            self._decide(Comparison(quartile(self.coexec_s), quartile(self.eager_s)))

    def _decide(self, result: Comparison) -> None:
        self.latest, self.lost = result, result.slower
        if self.lost:
            self.left, self.rested = max(self.next_rest, self._least_rest()), 0
            self.next_rest = min(2 * self.next_rest, LONGEST_REST)
            self.next_turns = UNDISTURBED
        else:
            self.next_rest = FIRST_REST
            self._co_execute(self.next_turns)

    def _least_rest(self) -> int:
        """Iterations of which a visit like the latest one costs PRICE, as far as that is possible."""
        assert self.latest is not None
        cost = (WAKING + COUNTED) * (self.stint_s / self.stint / self.latest.eager_s - 1)  # in plain iterations
        return max(LEAST_REST, min(math.ceil(cost / PRICE), LONGEST_REST))
