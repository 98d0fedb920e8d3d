"""Cuts the basic blocks of a plan into segments, the units that backends compile and the GraphRunner executes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from coexec.errors import InternalError
from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import NO_BLOCK, BasicBlock, Plan
from coexec.plan.loops import NO_LOOP
from coexec.plan.memory import external_writes, needs_python
from coexec.plan.rules import RULES, BlockFacts, Kind, Limits, OpenSegment, distances, first_cut
from coexec.records import OpKind

BytesOf = Callable[[int, int], int]
"""(node id, input position) -> bytes that the node writes through this input."""

DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one basic block that is executed as one graph, or by Python."""

    id: int  # dense, in the order of blocks and of nodes in them
    block: int
    nodes: tuple[int, ...]  # contiguous in the block; includes VIEW and HOST nodes, which are not executed by a graph
    kind: Kind
    fetches: tuple[int, ...]  # FETCH nodes, published from inside
    feeds: tuple[int, ...]  # nodes for which the graph needs a word from Python before it starts
    copied_writes: tuple[tuple[int, int], ...]  # (node, input position) done on copies; whoever runs it commits them
    compile: bool  # False: too little work, in a loop, or Python runs it
    in_loop: bool = False  # each pass is replayed: its values are those of this pass and of earlier ones


@dataclass(frozen=True, slots=True)
class Segments:
    """All segments of a plan."""

    segments: tuple[Segment, ...]  # by id
    of_block: tuple[tuple[int, ...], ...]  # segment ids per block id, in order
    segment_of: tuple[int, ...]  # segment id per node id, NO_BLOCK for nodes that are in no block


def cut_segments(
    graph: TraceGraph,
    plan: Plan,
    bytes_of: BytesOf,
    limits: Limits = DEFAULT_LIMITS,
    late: Collection[int] = (),
    apart: Collection[int] = (),
) -> Segments:
    """Returns the segments of `plan`; linear in the graph, but for one sort.

    A later segment that reads memory of `copied_writes` must be given the copy until it is committed.

    Args:
        bytes_of: asked for writes to the outside's memory only.
        late: nodes that need a word from Python although the graph does not show it: found out by running it.
        apart: nodes that no backend compiles: found out by trying. Each has a segment of its own.
    """
    writes = external_writes(graph)
    segments: list[Segment] = []
    of_block: list[tuple[int, ...]] = []
    loop_of = plan.loop_of_block()
    segment_of = [NO_BLOCK] * len(graph.nodes)
    for block in plan.blocks:
        facts = _facts(graph, block, writes, bytes_of, late, apart)
        first = len(segments)
        for kind, start, stop in _stretches(facts, limits):
            in_loop = loop_of[block.id] != NO_LOOP
            segments.append(_segment(len(segments), block, facts, kind, start, stop, limits, in_loop))
            for node in segments[-1].nodes:
                segment_of[node] = segments[-1].id
        of_block.append(tuple(range(first, len(segments))))
    return Segments(tuple(segments), tuple(of_block), tuple(segment_of))


def _facts(
    graph: TraceGraph,
    block: BasicBlock,
    writes: dict[int, tuple[int, ...]],
    bytes_of: BytesOf,
    known_late: Collection[int],
    apart: Collection[int],
) -> BlockFacts:
    nodes = [graph.nodes[node] for node in block.nodes]
    external = [writes.get(node.id, ()) for node in nodes]
    sizes = [[bytes_of(node.id, position) for position in external[index]] for index, node in enumerate(nodes)]
    late = [node.id in known_late or needs_python(graph, node) for node in nodes]
    return BlockFacts(
        nodes, external, [max(size, default=0) for size in sizes], [sum(size) for size in sizes], late,
        [node.id in apart for node in nodes], *distances(nodes, external),
    )  # fmt: skip


def _stretches(facts: BlockFacts, limits: Limits) -> Iterator[tuple[Kind, int, int]]:
    """Yields (kind, start, stop) of the segments of one block, as the rules cut it."""
    segment = OpenSegment("functional", 0)
    for index in range(len(facts.nodes)):
        for _ in RULES:
            cut = first_cut(facts, segment, index, limits)
            if cut is None:
                break
            if cut.start > segment.start:
                yield segment.kind, segment.start, cut.start
            segment = OpenSegment(cut.kind, cut.start)
            for moved in range(cut.start, index):
                segment.add(facts, moved)
        else:
            raise InternalError(f"The rules cut for ever at node {facts.nodes[index].id}: {cut} under {limits}.")
        segment.add(facts, index)
    yield segment.kind, segment.start, len(facts.nodes)


def _segment(
    segment_id: int, block: BasicBlock, facts: BlockFacts, kind: Kind, start: int, stop: int, limits: Limits,
    in_loop: bool,
) -> Segment:  # fmt: skip
    span = range(start, stop)
    ops = sum(facts.nodes[index].kind == OpKind.COMPUTE for index in span)
    copied = ((block.nodes[index], position) for index in span for position in facts.external[index])
    return Segment(
        segment_id,
        block.id,
        block.nodes[start:stop],
        kind,
        fetches=tuple(block.nodes[index] for index in span if facts.nodes[index].kind == OpKind.FETCH),
        feeds=tuple(block.nodes[index] for index in span if facts.late[index]),
        copied_writes=tuple(copied) if kind == "functional" else (),
        compile=kind != "python" and ops >= limits.min_ops and not in_loop,
        in_loop=in_loop,
    )
