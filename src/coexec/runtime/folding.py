"""Folding loops: which loop of the user's code an op is in, and telling the native step to treat it as one stretch."""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType
from typing import Any

from coexec.graph.repetition import Repetitions
from coexec.records import Trace

MAX_FOLDINGS = 16
"""How often a step may begin anew with more loops folded; a program that needs more never repeats itself."""

Chain = Sequence[tuple[CodeType, int]]
"""(code object, byte offset) per frame, innermost first."""

Span = tuple[int, int]
"""Byte offsets of the first and the last instruction of a loop."""


class LoopFolder:
    """Watches the traces of one step, and folds the loops whose trip counts vary."""

    def __init__(self) -> None:
        self.foldings = 0
        self._lists: set[int] = set()  # locations that were folded
        self._repetitions = Repetitions()

    def learn(self, trace: Trace, new_path: bool, native: Any) -> bool:
        """Takes a merged trace. True if loops were folded: native program and TraceGraph are to be built anew."""
        varying = self._repetitions.learn(trace, new_path)
        lists = varying.lists - self._lists  # some can only be done as a whole
        if not (varying.loops or lists) or self.foldings >= MAX_FOLDINGS:
            return False
        self.foldings += 1
        constant = [native.chain(location) for location in self._repetitions.constant()]
        for location in sorted(varying.loops):
            self._fold(native, location, constant)
        for location in sorted(lists):
            native.fold_list(location)
        self._lists |= lists
        self._repetitions = Repetitions()  # the ops of backward passes have other locations from now on
        return True

    def _fold(self, native: Any, location: int, constant: Sequence[Chain]) -> None:
        """Folds the innermost loop around an op, or the op alone: C++ may loop, or Python skip it in some passes."""
        chain: Chain = native.chain(location)
        for depth, (code, offset) in enumerate(chain):
            span = enclosing_loop(code, offset)
            if span is None:
                continue
            if any(_holds(chain[depth:], span, other) for other in constant):
                break
            native.fold_loop(location, depth, *span)
            return
        native.fold_location(location)


def _holds(frames: Chain, span: Span, other: Chain) -> bool:
    """True if the loop at `span` of `frames[0]`, called from the others, holds the op with the chain `other`."""
    above = len(other) - len(frames)
    if above < 0 or other[above][0] is not frames[0][0] or not span[0] <= other[above][1] <= span[1]:
        return False
    return list(other[above + 1 :]) == list(frames[1:])


def enclosing_loop(code: CodeType, offset: int) -> Span | None:
    """Returns the innermost loop of `code` around the instruction at a byte offset."""
    around = [span for span in loops_of(code) if span[0] <= offset <= span[1]]
    return min(around, key=lambda span: span[1] - span[0], default=None)


@functools.lru_cache(maxsize=1024)
def loops_of(code: CodeType) -> tuple[Span, ...]:
    """Returns the loops of `code`, by their backward jumps. Two that overlap are one: `continue` jumps back as well."""
    spans: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        if "JUMP_BACKWARD" in instruction.opname and not instruction.opname.endswith("NO_INTERRUPT"):  # `await`
            spans[instruction.argval] = max(spans.get(instruction.argval, 0), instruction.offset)
    merged: list[Span] = []
    for first, last in sorted(spans.items()):
        apart = [span for span in merged if not _overlap(span, (first, last))]
        touched = [span for span in merged if _overlap(span, (first, last))]
        joined = (min([first, *(a for a, _ in touched)]), max([last, *(b for _, b in touched)]))
        merged = [*apart, joined]
    return tuple(merged)


def _overlap(a: Span, b: Span) -> bool:
    """True if they share a part, and neither holds the other. `a` begins first."""
    return a[0] < b[0] <= a[1] < b[1]
