"""How long one program may take, and how that time is shared out: a run that has to end at an hour.

Without a budget everything has the time that it takes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

CONVERSIONS, STARTS = 0.2, 0.75
"""By then, as a share of the budget, the conversions are over, and the last contender has warmed up."""

SETTLE = 0.2
"""How much of the budget coexec may train until it has compiled, and is then waited for."""

FEWEST_ROUNDS = 3
"""Turns that are taken although the time is up: a median needs some."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of one program, from now on."""

    seconds: float = math.inf
    began_s: float = field(default_factory=time.monotonic)

    def left_s(self, share: float = 1.0) -> float:
        """Returns the seconds until `share` of the budget is used up; 0.0 if it is."""
        return max(0.0, self.began_s + share * self.seconds - time.monotonic())

    def settle_s(self, wanted_s: float) -> float:
        """Returns how long coexec is given to settle."""
        return min(wanted_s, SETTLE * self.seconds)

    def allows_round(self, number: int) -> bool:
        """Whether round `number`, from 0, is begun."""
        return number < FEWEST_ROUNDS or self.left_s() > 0.0


UNLIMITED = Budget()
