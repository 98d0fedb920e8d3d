"""The case assignment algorithm (Terra, section on the GraphGenerator): TraceGraph -> ordered list of Switch-Cases.

Basic blocks are maximal linear chains. The level of a block is the longest path to it, counted in blocks; the blocks of
one level are the cases of one Switch-Case. Levels grow along every forward edge, so no path meets two cases of one
level, every block is assigned once, and every trace is the list run in order, with a no-op where its path skips a
level. A loop is a range of levels, a While node: at its end Loop Cond decides whether the range is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from coexec.errors import InternalError
from coexec.graph.tracegraph import END, START, Edge, TraceGraph
from coexec.plan.loops import NO_LOOP, Loop, arrange

NO_BLOCK = -1
"""Entry of `Plan.block_of` for START and END, and for nodes that no edge leads to (:mod:`coexec.graph.recurring`)."""


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A maximal linear chain of the TraceGraph."""

    id: int  # dense, in topological order
    nodes: tuple[int, ...]  # at least one


@dataclass(frozen=True, slots=True)
class SwitchCase:
    """The blocks of one level, of which a path runs at most one."""

    level: int  # position in `Plan.switch_cases`
    cases: tuple[BasicBlock, ...]  # in the order of discovery
    may_skip: bool  # some edge jumps over the level: the no-op is a case too

    @property
    def selectors(self) -> tuple[int, ...]:
        """Per case the node that picks it: Case Select takes the case whose first node Python validated."""
        return tuple(block.nodes[0] for block in self.cases)

    @property
    def is_branch(self) -> bool:
        """True if the GraphRunner has to wait for Case Select here."""
        return self.may_skip or len(self.cases) > 1


@dataclass(frozen=True, slots=True)
class While:
    """A range of Switch-Cases that a path may run several times."""

    id: int  # dense; nested ones come after those around them
    first_level: int
    last_level: int
    blocks: tuple[int, ...]  # ids; those of nested loops too
    back_edges: tuple[Edge, ...]  # between nodes: they begin another pass of this loop
    conds: tuple[int, ...]  # Loop Cond: nodes after which Python goes on with the pass, begins another, or leaves
    parent: int  # id of the loop around it, or NO_LOOP


@dataclass(frozen=True, slots=True)
class Plan:
    """The ordered list of Switch-Cases of a step, and the ranges of it that are loops."""

    switch_cases: tuple[SwitchCase, ...]  # by level
    blocks: tuple[BasicBlock, ...]  # by id
    block_of: tuple[int, ...]  # block id per node id, NO_BLOCK for START and END
    level_of: tuple[int, ...]  # level per block id
    loops: tuple[While, ...] = ()  # by id

    def loop_of_block(self) -> tuple[int, ...]:
        """Returns the innermost loop per block id, NO_LOOP outside of loops."""
        loop_of = [NO_LOOP] * len(self.blocks)
        for loop in self.loops:  # inner ones come later
            for block in loop.blocks:
                loop_of[block] = loop.id
        return tuple(loop_of)


def assign_cases(graph: TraceGraph) -> Plan:
    """Returns the plan of `graph`; linear in nodes and edges, but for one sort and for the nesting of loops."""
    blocks, block_of = _basic_blocks(graph)
    level_of, ranges = arrange(_successors(graph, blocks, block_of))
    loops = tuple(_while(graph, index, loop, blocks) for index, loop in enumerate(ranges))
    by_level: list[list[BasicBlock]] = [[] for _ in range(max(level_of, default=-1) + 1)]
    for block in blocks:
        by_level[level_of[block.id]].append(block)
    skipped = _skipped_levels(graph, len(by_level), block_of, level_of, loops)
    switch_cases = (
        SwitchCase(level, tuple(sorted(cases, key=lambda block: block.nodes[0])), skipped[level])
        for level, cases in enumerate(by_level)
    )
    return Plan(tuple(switch_cases), blocks, block_of, level_of, loops)


def run_in_order(plan: Plan, path: tuple[int, ...]) -> Iterator[BasicBlock | None]:
    """Yields what each Switch-Case does for a path, in each pass of a loop: a case, or None for the no-op.

    Args:
        path: node ids without START and END; a prefix of a path (the step raised) is one too.

    Raises:
        InternalError: the list does not cover the path.
    """
    at = level = 0
    while level < len(plan.switch_cases):
        switch_case = plan.switch_cases[level]
        block = next((case for case in switch_case.cases if path[at : at + 1] == case.nodes[:1]), None)
        if block is not None:
            taken = path[at : at + len(block.nodes)]
            if taken != block.nodes[: len(taken)]:
                raise InternalError(f"The path leaves block {block.id} in its middle, after node {path[at]}.")
            at += len(taken)
        elif not switch_case.may_skip and at < len(path):
            raise InternalError(f"The path skips level {switch_case.level}, which has no no-op, at node {path[at]}.")
        yield block
        level = _next_level(plan, level, path[at : at + 1])
    if at < len(path):
        raise InternalError(f"Node {path[at]} of the path is in no Switch-Case after those already run.")


def _next_level(plan: Plan, level: int, following: tuple[int, ...]) -> int:
    """Loop Cond: back to the first level of a loop that ends here, if the path goes on inside of it."""
    to = plan.level_of[plan.block_of[following[0]]] if following else len(plan.switch_cases)
    for loop in reversed(plan.loops):  # innermost first
        if loop.last_level == level and loop.first_level <= to <= level:
            return loop.first_level
    return level + 1


def _basic_blocks(graph: TraceGraph) -> tuple[tuple[BasicBlock, ...], tuple[int, ...]]:
    """Returns the chains, and the block id per node. Rank order meets a chain's nodes in order."""
    block_of = [NO_BLOCK] * len(graph.nodes)
    chains: list[list[int]] = []
    planned = (node for node in graph.nodes[END + 1 :] if node.parents)  # not what only the first iteration did
    for node in sorted(planned, key=lambda node: node.rank):
        parent = node.parents[0] if len(node.parents) == 1 else START
        if parent != START and len(graph.nodes[parent].children) == 1:
            block_of[node.id] = block_of[parent]
            chains[block_of[parent]].append(node.id)
        else:
            block_of[node.id] = len(chains)
            chains.append([node.id])
    return tuple(BasicBlock(index, tuple(chain)) for index, chain in enumerate(chains)), tuple(block_of)


def _successors(graph: TraceGraph, blocks: tuple[BasicBlock, ...], block_of: tuple[int, ...]) -> list[list[int]]:
    """Returns the blocks that may follow each block."""
    return [[block_of[child] for child in graph.nodes[block.nodes[-1]].children if child != END] for block in blocks]


def _while(graph: TraceGraph, index: int, loop: Loop, blocks: tuple[BasicBlock, ...]) -> While:
    """Returns a loop of blocks in terms of nodes."""
    back_edges = tuple((blocks[block].nodes[-1], blocks[to].nodes[0]) for block, to in loop.again)
    inside = {blocks[block].nodes[0] for block in loop.blocks}
    lasts = (graph.nodes[blocks[block].nodes[-1]] for block in loop.blocks)
    conds = tuple(
        node.id
        for node in lasts
        if len(node.children) > 1
        and any(child not in inside or (node.id, child) in back_edges for child in node.children)
    )
    return While(index, loop.first_level, loop.last_level, loop.blocks, back_edges, conds, loop.parent)


def _skipped_levels(
    graph: TraceGraph, levels: int, block_of: tuple[int, ...], level_of: tuple[int, ...], loops: tuple[While, ...]
) -> tuple[bool, ...]:
    """Returns per level whether an edge jumps over it; counts the jumps by where they begin and end.

    A back edge jumps over what is left of the loop, and over what comes before the block that it leads to.
    """
    change = [0] * (levels + 1)
    for parent, child in graph.edge_visits.keys() - graph.back_edges:
        if parent != START and block_of[parent] == block_of[child]:
            continue
        above = -1 if parent == START else level_of[block_of[parent]]
        below = levels if child == END else level_of[block_of[child]]
        change[above + 1] += 1
        change[below] -= 1
    for loop in loops:
        for parent, child in loop.back_edges:
            change[level_of[block_of[parent]] + 1] += 1
            change[loop.last_level + 1] -= 1
            change[loop.first_level] += 1
            change[level_of[block_of[child]]] -= 1
    return tuple(jumps > 0 for jumps in accumulate(change[:-1]))
