"""Levels of basic blocks, and While nodes (Terra, section on the GraphGenerator).

A loop is a strongly connected component of the blocks. Its levels are one range, above those of all that leads into it
and below those of all that it leads to. Without the edges back to its first block it falls apart into blocks and the
loops nested in it, which get their ranges inside its own in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coexec.graph.components import strongly_connected

NO_LOOP = -1
"""`While.parent` of an outermost loop."""

MAX_NESTING = 16
"""Loops nested deeper are one: code that jumps about at random would fall apart block by block."""

BlockEdge = tuple[int, int]
"""(from block id, to block id)"""


@dataclass(frozen=True, slots=True)
class Loop:
    """A range of levels that a path may run several times."""

    first_level: int
    last_level: int
    blocks: tuple[int, ...]  # ids, ascending; those of nested loops too
    again: tuple[BlockEdge, ...]  # edges that begin another pass; a nested loop has its own
    parent: int  # index of the loop around it, or NO_LOOP


def arrange(successors: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[Loop, ...]]:
    """Returns the level of each block, and the loops, each after the one around it.

    Args:
        successors: per block; ids are in topological order of forward edges.
    """
    arrangement = _Arrangement(successors)
    arrangement.place(list(range(len(successors))), 0, NO_LOOP, 0)
    return tuple(arrangement.levels), tuple(loop for loop in arrangement.loops if loop is not None)


class _Arrangement:
    """Levels and loops so far."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self.successors = [list(following) for following in successors]  # without the edges already called `again`
        self.levels = [0] * len(successors)
        self.loops: list[Loop | None] = []  # None: being arranged

    def place(self, blocks: list[int], base: int, parent: int, depth: int) -> int:
        """Gives `blocks` levels from `base` on; returns the last one. Edges to other blocks do not count."""
        number = {block: index for index, block in enumerate(blocks)}
        inner = [[number[to] for to in self.successors[block] if to in number] for block in blocks]
        floor = [base] * len(blocks)
        last = base - 1
        for component in reversed(strongly_connected(inner)):
            low = max(floor[index] for index in component)
            members = sorted(blocks[index] for index in component)
            end = self._place_component(members, low, parent, depth)
            last = max(last, end)
            for index in component:
                for following in inner[index]:
                    floor[following] = max(floor[following], end + 1)
        return last

    def _place_component(self, members: list[int], low: int, parent: int, depth: int) -> int:
        again = self._again(members, depth)
        if not again:
            self.levels[members[0]] = low
            return low
        for block, to in again:
            self.successors[block].remove(to)
        index = len(self.loops)
        self.loops.append(None)
        end = self.place(members, low, index, depth + 1)
        self.loops[index] = Loop(low, end, tuple(members), again, parent)
        return end

    def _again(self, members: list[int], depth: int) -> tuple[BlockEdge, ...]:
        """Edges back to the first block; all edges back, where loops are nested too deep. () if it is no loop."""
        if len(members) == 1:
            return tuple((members[0], to) for to in self.successors[members[0]] if to == members[0])
        heads = members if depth >= MAX_NESTING else members[:1]
        inside = set(members)
        return tuple(
            (block, to)
            for block in members
            for to in self.successors[block]
            if to in inside and to <= block and to in heads
        )
