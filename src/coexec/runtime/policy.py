"""When a step traces, co-executes, or is left alone. Pure decisions, no torch."""

from __future__ import annotations

import enum
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
    runs plain eager for a number of iterations that doubles each time. An iteration that is known but for a little is
    the less of a failure: a program that takes one of many ways at random has to be seen on each of them.
    """

    PATIENCE = 8.0  # failures in a row before the step is left alone
    LITTLE = 1 / 16  # of an iteration's ops: what is new is little
    LITTLE_COUNTS = 1 / 4  # of a failure
    FIRST_REST = 32  # iterations; doubled after each retry that fails, up to LONGEST_REST
    LONGEST_REST = 4096
    RETRIES = 3.0  # failures of a retry

    phase: Phase = Phase.TRACING
    failures: float = 0.0  # of the latest iterations: all were traced or fell back with something new
    failed: int = 0  # how many iterations these were
    rest: int = 0  # iterations of plain eager left
    next_rest: int = FIRST_REST
    retrying: bool = False
    reason: str = ""  # why the step was last left to plain eager, for people

    def start_iteration(self) -> Phase:
        """Returns what this iteration does."""
        if self.phase is Phase.EAGER:
            self.rest -= 1
            if self.rest <= 0:
                self.phase, self.retrying = Phase.TRACING, True
                self._succeed()
                return Phase.TRACING
        return self.phase

    def learned(self, something_new: bool, complete: bool, share: float = 1.0) -> None:
        """A trace was merged, of a whole iteration or from a fallback on; `share` of its ops brought something new."""
        if not something_new:
            self._succeed()
            if complete:
                self.phase = Phase.CO_EXECUTION
            return
        self.failed += 1
        self.failures += self.LITTLE_COUNTS if share <= self.LITTLE else 1
        if self.failures >= (self.RETRIES if self.retrying else self.PATIENCE):
            self._leave_alone(f"the last {self.failed} calls each did something that the graph did not know")

    def start_anew(self) -> None:
        """What was learned is given up for a better graph: its first traces are no failures."""
        self.phase = Phase.TRACING
        self._succeed()

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
