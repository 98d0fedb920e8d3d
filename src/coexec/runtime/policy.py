"""When a step traces, co-executes, or is left alone. Pure decisions, no torch."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Phase(enum.Enum):
    """What the next call of a step does."""

    BUILDING = "building"  # the native core is not there yet: plain eager
    TRACING = "tracing"
    CO_EXECUTION = "co-execution"
    EAGER = "eager"  # the step never settles: plain eager, tried again rarely


FOR_GOOD = 1 << 62
"""Iterations."""


@dataclass(slots=True)
class PhasePolicy:
    """Decides by counting: the paper's rule (co-execute when the newest trace was covered), with a way out.

    A program whose every iteration is a new path would pay for tracing for ever. After `PATIENCE` failures in a row it
    runs plain eager for a number of iterations that doubles each time, and that is large enough for the retry before it
    to have cost no more than `PRICE` of them. An iteration that is known but for a little is the less of a failure: a
    program that takes one of many ways at random has to be seen on each of them.
    """

    PATIENCE = 8.0  # failures in a row before the step is left alone
    LITTLE = 1 / 16  # of an iteration's ops: what is new is little
    LITTLE_COUNTS = 1 / 4  # of a failure
    FIRST_REST = 32  # iterations; doubled after each retry that fails, up to LONGEST_REST
    LONGEST_REST = 4096
    RETRIES = 3.0  # failures of a retry
    PRICE = 0.03  # what a retry that failed may cost, as a share of the rest after it

    phase: Phase = Phase.TRACING
    failures: float = 0.0  # of the latest iterations: all were traced or fell back with something new
    failed: int = 0  # how many iterations these were
    rest: int = 0  # iterations of plain eager left
    next_rest: int = FIRST_REST
    retrying: bool = False
    plain_s: float = 0.0  # a plain iteration of the rests, smoothed
    spent_s: float = 0.0  # of the retry under way
    reason: str = ""  # why the step was last left to plain eager, for people

    def start_iteration(self) -> Phase:
        """Returns what this iteration does."""
        if self.phase is Phase.EAGER:
            self.rest -= 1
            if self.rest <= 0:
                self.phase, self.retrying, self.spent_s = Phase.TRACING, True, 0.0
                self._succeed()
                return Phase.TRACING
        return self.phase

    def rested(self, seconds: float) -> None:
        """A plain iteration of a rest took so long."""
        self.plain_s = 0.9 * self.plain_s + 0.1 * seconds if self.plain_s else seconds

    def learned(self, something_new: bool, complete: bool, seconds: float = 0.0, share: float = 1.0) -> None:
        """A trace was merged, of a whole iteration or from a fallback on.

        `seconds`: what both took. `share`: of its ops, those that brought something new.
        """
        self.spent_s += seconds
        if not something_new:
            self._succeed()
            if complete:
                self.phase = Phase.CO_EXECUTION
            return
        self.failed += 1
        self.failures += self.LITTLE_COUNTS if share <= self.LITTLE else 1
        if self.failures >= (self.RETRIES if self.retrying else self.PATIENCE):
            if self.retrying:
                self.next_rest = max(self.next_rest, self._rest_that_pays())
            self._leave_alone(f"the last {self.failed} calls each did something that the graph did not know")

    def start_anew(self) -> None:
        """What was learned is given up for a better graph: its first traces are no failures."""
        self.phase = Phase.TRACING
        self._succeed()

    def _rest_that_pays(self) -> int:
        """Returns the iterations of which the retry's cost is PRICE."""
        if not self.plain_s:
            return 0
        cost = self.spent_s / self.plain_s - self.failed  # in plain iterations
        return min(math.ceil(cost / self.PRICE), self.LONGEST_REST)

    def co_executed(self) -> None:
        """A whole iteration ran in co-execution."""
        self._succeed()
        self.retrying = False
        self.next_rest = self.FIRST_REST

    def _succeed(self) -> None:
        self.failures, self.failed = 0.0, 0

    def _leave_alone(self, reason: str) -> None:
        self.phase, self.reason = Phase.EAGER, reason
        self.rest = self.next_rest
        self.next_rest = min(self.next_rest * 2, self.LONGEST_REST)

    def give_up(self, reason: str) -> None:
        """Plain eager from now on, but for rare retries."""
        self.next_rest = self.LONGEST_REST
        self._leave_alone(reason)

    def not_worth_it(self) -> None:
        """Co-execution works but does not pay: plain eager, tried again after a long rest."""
        self.next_rest = self.LONGEST_REST
        self._leave_alone("plain eager is faster")

    def settle(self, reason: str) -> None:
        """Plain eager for good."""
        self.phase, self.rest, self.reason = Phase.EAGER, FOR_GOOD, reason
