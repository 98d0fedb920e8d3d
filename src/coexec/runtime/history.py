"""What happened to a step, kept for `explain()`: bounded, with the user's file and line."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from coexec.intercept.kernel_warnings import line_of

LATEST = 50
"""Fallbacks kept with their place; all are counted."""

_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True, slots=True)
class FallbackEvent:
    """One fallback."""

    iteration: int
    reason: str
    op: str  # what Python did where the graph knew something else
    place: str  # "file:line in function" of the user's code

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.reason}: {self.op} at {self.place}"


class History:
    """The latest events of one step."""

    def __init__(self) -> None:
        self.fallbacks: deque[FallbackEvent] = deque(maxlen=LATEST)

    def fallback(self, iteration: int, event: tuple[str, str, int, int], native: Any) -> FallbackEvent:
        """Notes and returns one fallback of `iteration`; `event` is (reason, op, location, node before it)."""
        reason, op, location, _ = event
        noted = FallbackEvent(iteration, reason, op, user_line(native.chain(location)))
        self.fallbacks.append(noted)
        return noted


def user_line(chain: list[tuple[Any, int]]) -> str:
    """Returns the innermost line outside torch and coexec of a chain of (code object, byte offset)."""
    for code, offset in chain:
        if not code.co_filename.startswith(_TORCH) and "coexec" not in code.co_filename.split(os.sep)[-3:-1]:
            return f"{code.co_filename}:{line_of(code, offset)} in {code.co_qualname}"
    return "unknown place"
