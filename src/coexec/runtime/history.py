"""What happened to a step, kept for `explain()`: bounded, with the user's file and line."""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coexec.intercept.kernel_warnings import line_of

LATEST = 50
"""Fallbacks kept with their place; all are counted."""

MOST_PLACES = 1000
"""Places counted; a program that makes code anew in each call has a new one every time."""

Chain = list[tuple[Any, int]]
"""Frames from the innermost to the step's: (code object, byte offset)."""

_NOT_THE_USERS = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (torch.__file__, Path(__file__).parent)
)
"""Folders whose code is never "the user's line": torch and coexec."""


@dataclass(frozen=True, slots=True)
class FallbackEvent:
    """One fallback."""

    iteration: int
    reason: str
    op: str  # what Python did where the graph knew something else
    place: str  # "file:line in function" of the user's code; "" where it is no line of theirs
    latest: int = 0  # iteration of the last one of `count` like this
    count: int = 1

    def __str__(self) -> str:
        often = f" (and {self.count - 1} more until call {self.latest})" if self.count > 1 else ""
        return f"call {self.iteration}: {self.reason}: {self.op}{f' at {self.place}' if self.place else ''}{often}"


@dataclass(frozen=True, slots=True)
class Waited:
    """Where Python waited for the graph."""

    reason: str  # one of WAITS
    place: str  # "file:line in function"; "" where it is no line of the step
    count: int
    seconds: float

    def __str__(self) -> str:
        what = WAITS[self.reason]
        text = f"{self.place} {what}" if self.place else what
        return f"{text}: {times(self.count)}, {self.seconds:.3f} s"


WAITS = {
    "fetch": "reads a value",
    "sync": "needs real tensors",
    "foreign write": "writes memory that others can see (NumPy, another process)",
    "step end": "the end of the step",
    "fallback": "handing over to plain tracing",
    "overlap": "after a call that had returned early",
    "case select": "chooses a branch",
    "input": "hands in a value",
}
"""The native core's reasons, in words."""


def times(count: int) -> str:
    """ "3 times"."""
    return "once" if count == 1 else f"{count} times"


def counted(count: int, one: str, several: str = "") -> str:
    """ "1 branch", "3 branches"."""
    return f"{count} {one if count == 1 else several or one + 's'}"


class History:
    """The latest events of one step."""

    def __init__(self) -> None:
        self.fallbacks: deque[FallbackEvent] = deque(maxlen=LATEST)
        self.new_paths: Counter[str] = Counter()  # by place: iterations that first did something new there

    def fallback(self, iteration: int, event: tuple[str, str, int, int], native: Any, completed: bool) -> FallbackEvent:
        """Notes and returns one fallback of `iteration`; `event` is (reason, op, location, node before it).

        `completed`: the step did not raise.
        """
        reason, op, location, _ = event
        chain = native.chain(location)
        place = user_line(chain) if chain else ""
        if reason == "exception" and not completed and (raised := sys.exception()) is not None:
            op, place = type(raised).__name__, _raised_at(raised)
        noted = FallbackEvent(iteration, reason, _plainly(reason, op, completed), place, iteration)
        self._keep(noted)
        return noted

    def new_path(self, op: str, chain: Chain) -> None:
        """Notes where an iteration first did what the graph did not know."""
        text = f"{op} at {user_line(chain)}"
        if text in self.new_paths or len(self.new_paths) < MOST_PLACES:
            self.new_paths[text] += 1

    def _keep(self, event: FallbackEvent) -> None:
        """One line for the same event again and again."""
        last = self.fallbacks[-1] if self.fallbacks else None
        if last is not None and (last.reason, last.op, last.place) == (event.reason, event.op, event.place):
            self.fallbacks[-1] = FallbackEvent(
                last.iteration, last.reason, last.op, last.place, event.iteration, last.count + 1
            )
        else:
            self.fallbacks.append(event)


def _plainly(reason: str, op: str, completed: bool) -> str:
    """What Python did, where it was no operation."""
    if reason == "exception" and not completed:
        return f"the step raised {op}".rstrip()
    return "the step returned" if reason == "early end" else op


def _raised_at(error: BaseException) -> str:
    """The innermost line of the user's that an exception passed; "" if it passed none."""
    frames = traceback.walk_tb(error.__traceback__)
    users = [(f, line) for f, line in frames if not f.f_code.co_filename.startswith(_NOT_THE_USERS)]
    return f"{users[-1][0].f_code.co_filename}:{users[-1][1]} in {users[-1][0].f_code.co_qualname}" if users else ""


def waits_of(raw: Iterable[tuple[str, Chain, int, float]]) -> list[Waited]:
    """Returns the waits that the native core has counted, by place, the longest first."""
    total: dict[tuple[str, str], tuple[int, float]] = {}
    for reason, chain, count, seconds in raw:
        key = (reason, user_line(chain) if chain else "")  # several ops of one line are one place
        known = total.get(key, (0, 0.0))
        total[key] = (known[0] + count, known[1] + seconds)
    waits = [Waited(reason, place, *counted) for (reason, place), counted in total.items() if counted[0]]
    return sorted(waits, key=lambda wait: -wait.seconds)


def user_line(chain: Chain) -> str:
    """Returns the innermost line outside torch and coexec of a chain of (code object, byte offset)."""
    for code, offset in chain:
        if not code.co_filename.startswith(_NOT_THE_USERS):
            return f"{code.co_filename}:{line_of(code, offset)} in {code.co_qualname}"
    return "unknown place"
