"""Checkers of a plan and of its segments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from coexec.errors import InternalError
from coexec.graph.components import loop_components
from coexec.graph.tracegraph import END, START, Node, TraceGraph
from coexec.plan.cases import NO_BLOCK, BasicBlock, Plan, While, run_in_order
from coexec.plan.loops import NO_LOOP
from coexec.plan.memory import PYTHON_RUNS, external_writes, needs_python
from coexec.plan.rules import Limits
from coexec.plan.segments import DEFAULT_LIMITS, BytesOf, Segment, Segments
from coexec.records import OpKind


def check_plan(plan: Plan, graph: TraceGraph) -> None:
    """Raises InternalError with the first problem of `find_plan_problems`."""
    for problem in find_plan_problems(plan, graph):
        raise InternalError(f"Malformed plan: {problem}.")


def check_segments(
    segments: Segments, plan: Plan, graph: TraceGraph, bytes_of: BytesOf, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Raises InternalError with the first problem of `find_segment_problems`."""
    for problem in find_segment_problems(segments, plan, graph, bytes_of, limits):
        raise InternalError(f"Malformed segments: {problem}.")


def find_plan_problems(plan: Plan, graph: TraceGraph) -> Iterator[str]:
    """Yields every broken invariant of the case assignment as text.

    Invariants:
    1. every node that an edge leads to, but END, is in exactly one block, every block in exactly one Switch-Case, and
       `block_of`, `level_of` and the levels themselves say the same;
    2. the nodes of a block are a chain: each is the only child of its only parent; and the chain is maximal;
    3. every forward edge between blocks goes to a higher level, and if it jumps over one, that one has a no-op; a back
       edge jumps over the rest of its loop; a level with a no-op is jumped over;
    4. the outermost loops hold the nodes of the graph's loops; ranges of levels are nested like the loops, or disjoint;
       what leads into a loop lies before its range, what it leads to behind it;
    5. every back edge belongs to one loop, and goes from one block of it to another or the same; after a Loop Cond
       there is a choice;
    6. every remembered path is covered by running the list in order.
    """
    yield from _assignment_problems(plan, graph)
    for block in plan.blocks:
        yield from (f"block {block.id} {problem}" for problem in _chain_problems(block, graph))
    yield from _level_problems(plan, graph)
    yield from _nesting_problems(plan, graph)
    for loop in plan.loops:
        yield from (f"loop {loop.id} {problem}" for problem in _loop_problems(loop, plan, graph))
    for path in graph.paths.values():
        yield from _cover_problems(plan, path.nodes)


def find_segment_problems(
    segments: Segments, plan: Plan, graph: TraceGraph, bytes_of: BytesOf, limits: Limits = DEFAULT_LIMITS
) -> Iterator[str]:
    """Yields every broken invariant of the segments as text.

    Invariants:
    1. the segments of a block are its nodes, in order, without gap or overlap, none empty; ids are dense and
       `segment_of` says the same;
    2. a python segment is one SYNC or BARRIER node, and these are in no other segment;
    3. a commit segment holds no FETCH: Python would wait in it, so it could never be validated;
    4. in a functional segment no node that needs a word from Python follows a FETCH;
    5. no node picks between values if one of them is made in its own segment, in the same pass;
    6. a functional segment copies all its writes to the outside's memory, and they are small; others copy nothing;
    7. a segment ends with a write to memory that other code can see (NumPy's): Python waits behind it;
    8. `fetches`, `feeds` and `compile` follow from the nodes, `in_loop` from the plan; nothing in a loop is compiled.
    """
    writes = external_writes(graph)
    loop_of = plan.loop_of_block()
    for index, segment in enumerate(segments.segments):
        if segment.id != index:
            yield f"segment {segment.id} stands at index {index}"
    for block in plan.blocks:
        yield from _span_problems(segments, block)
    for segment in segments.segments:
        nodes = [graph.nodes[node] for node in segment.nodes]
        found = [
            *_kind_problems(segment, nodes),
            *_order_problems(segment, nodes, graph),
            *_write_problems(segment, writes, bytes_of, limits),
            *_foreign_write_problems(nodes, writes),
            *_summary_problems(segment, nodes, graph, limits),
            *_loop_membership_problems(segment, loop_of),
        ]
        yield from (f"segment {segment.id} ({segment.kind}) {problem}" for problem in found)


def _assignment_problems(plan: Plan, graph: TraceGraph) -> Iterator[str]:
    placed = sorted(node for block in plan.blocks for node in block.nodes)
    if placed != [node.id for node in graph.nodes[END + 1 :] if node.parents]:
        yield "the blocks do not hold every node once"
    assigned = sorted(case.id for switch_case in plan.switch_cases for case in switch_case.cases)
    if assigned != [block.id for block in plan.blocks] or assigned != list(range(len(plan.blocks))):
        yield "the Switch-Cases do not hold every block once"
    block_of = [NO_BLOCK] * len(graph.nodes)
    for block in plan.blocks:
        for node in block.nodes:
            block_of[node] = block.id
    if tuple(block_of) != plan.block_of:
        yield "`block_of` does not say what the blocks say"
    for level, switch_case in enumerate(plan.switch_cases):
        if switch_case.level != level or any(plan.level_of[case.id] != level for case in switch_case.cases):
            yield f"the Switch-Case at {level} or one of its cases has another level"


def _chain_problems(block: BasicBlock, graph: TraceGraph) -> Iterator[str]:
    if not block.nodes:
        yield "is empty"
        return
    for parent, child in itertools.pairwise(block.nodes):
        if graph.nodes[parent].children != [child] or graph.nodes[child].parents != [parent]:
            yield f"goes from {parent} to {child}, which is no chain"
    before = graph.nodes[block.nodes[0]].parents
    if len(before) == 1 and before[0] != START and len(graph.nodes[before[0]].children) == 1:
        yield f"is not maximal: node {before[0]} belongs to it"


def _level_problems(plan: Plan, graph: TraceGraph) -> Iterator[str]:
    jumped: set[int] = set()
    for loop in plan.loops:
        for parent, child in loop.back_edges:
            jumped.update(range(plan.level_of[plan.block_of[parent]] + 1, loop.last_level + 1))
            jumped.update(range(loop.first_level, plan.level_of[plan.block_of[child]]))
    for parent, child in graph.edge_visits.keys() - graph.back_edges:
        above = -1 if parent == START else plan.level_of[plan.block_of[parent]]
        below = len(plan.switch_cases) if child == END else plan.level_of[plan.block_of[child]]
        inside = parent != START and child != END and plan.block_of[parent] == plan.block_of[child]
        if not inside and below <= above:
            yield f"edge {(parent, child)} goes from level {above} to level {below}"
        jumped.update(range(above + 1, below))
    for switch_case in plan.switch_cases:
        if switch_case.may_skip != (switch_case.level in jumped):
            yield f"level {switch_case.level} has may_skip={switch_case.may_skip}, and the edges say otherwise"


def _loop_membership_problems(segment: Segment, loop_of: tuple[int, ...]) -> Iterator[str]:
    if segment.block < len(loop_of) and segment.in_loop != (loop_of[segment.block] != NO_LOOP):
        yield f"has in_loop={segment.in_loop}, and its block is in loop {loop_of[segment.block]}"


def _nesting_problems(plan: Plan, graph: TraceGraph) -> Iterator[str]:
    nodes = [{node for block in loop.blocks for node in plan.blocks[block].nodes} for loop in plan.loops]
    outermost = sorted(sorted(nodes[loop.id]) for loop in plan.loops if loop.parent == NO_LOOP)
    if outermost != sorted(sorted(found) for found in loop_components(graph)):
        yield "the outermost loops are not those of the graph"
    for index, loop in enumerate(plan.loops):
        if loop.id != index or not (loop.parent == NO_LOOP or 0 <= loop.parent < index):
            yield f"loop {loop.id} stands at index {index}, in loop {loop.parent}"
        elif loop.parent != NO_LOOP and not nodes[index] <= nodes[loop.parent]:
            yield f"loop {index} is not inside loop {loop.parent}"
    for outer, inner in itertools.combinations(plan.loops, 2):
        nested = nodes[inner.id] <= nodes[outer.id]
        if not nested and not nodes[inner.id].isdisjoint(nodes[outer.id]):
            yield f"loops {outer.id} and {inner.id} share blocks"
    owned = sorted(edge for loop in plan.loops for edge in loop.back_edges)
    if owned != sorted(graph.back_edges):
        yield f"the loops have the back edges {owned}, the graph {sorted(graph.back_edges)}"


def _loop_problems(loop: While, plan: Plan, graph: TraceGraph) -> Iterator[str]:
    levels = [plan.level_of[block] for block in loop.blocks]
    if (min(levels), max(levels)) != (loop.first_level, loop.last_level):
        yield f"has levels {min(levels)} to {max(levels)}, and says {loop.first_level} to {loop.last_level}"
    inside = {node for block in loop.blocks for node in plan.blocks[block].nodes}
    for parent, child in graph.edge_visits.keys() - graph.back_edges:
        leaves, enters = parent in inside and child != END, child in inside and parent != START
        if leaves and not enters and plan.level_of[plan.block_of[child]] <= loop.last_level:
            yield f"is left over {(parent, child)} to a level of its own"
        if enters and not leaves and plan.level_of[plan.block_of[parent]] >= loop.first_level:
            yield f"is entered over {(parent, child)} from a level of its own"
    for edge in loop.back_edges:
        if not inside.issuperset(edge):
            yield f"is begun again from outside, over {edge}"
    for node in loop.conds:
        if node not in inside or len(graph.nodes[node].children) < 2:
            yield f"has the Loop Cond {node}, where nothing is decided"


def _cover_problems(plan: Plan, path: tuple[int, ...]) -> Iterator[str]:
    try:
        for _ in run_in_order(plan, path):
            pass
    except InternalError as error:
        yield f"a remembered path is not covered: {error}"


def _span_problems(segments: Segments, block: BasicBlock) -> Iterator[str]:
    mine = [segments.segments[index] for index in segments.of_block[block.id]]
    if tuple(node for segment in mine for node in segment.nodes) != block.nodes:
        yield f"the segments of block {block.id} are not its nodes in order"
    for segment in mine:
        if segment.block != block.id or not segment.nodes:
            yield f"segment {segment.id} is empty or belongs to block {segment.block}, not {block.id}"
        if any(segments.segment_of[node] != segment.id for node in segment.nodes):
            yield f"`segment_of` does not say what segment {segment.id} says"


def _kind_problems(segment: Segment, nodes: list[Node]) -> Iterator[str]:
    by_python = [node.id for node in nodes if node.kind in PYTHON_RUNS]
    if segment.kind == "python" and (len(nodes) != 1 or not by_python):
        yield f"is not one SYNC or BARRIER node, but {segment.nodes}"
    if segment.kind != "python" and by_python:
        yield f"holds nodes {by_python}, which Python runs"


def _order_problems(segment: Segment, nodes: list[Node], graph: TraceGraph) -> Iterator[str]:
    fetch, made = -1, set[int]()
    for node in nodes:
        if segment.kind == "functional" and fetch >= 0 and needs_python(graph, node):
            yield f"needs a word from Python for node {node.id} after the FETCH {fetch}"
        for position in node.ambiguous if node.kind != OpKind.HOST else ():  # graphs step over what Python has done
            if any(source in made for source, _ in node.inputs[position]):
                yield f"makes a value that Python picks at input {position} of node {node.id}"
        made.add(node.id)
        if node.kind == OpKind.FETCH:
            fetch = node.id
    if segment.kind == "commit" and fetch >= 0:
        yield f"holds the FETCH {fetch}, at which Python waits"


def _write_problems(
    segment: Segment, writes: dict[int, tuple[int, ...]], bytes_of: BytesOf, limits: Limits
) -> Iterator[str]:
    outside = tuple((node, position) for node in segment.nodes for position in writes.get(node, ()))
    if segment.copied_writes != (outside if segment.kind == "functional" else ()):
        yield f"copies the writes {segment.copied_writes}; its external writes are {outside}"
    sizes = [bytes_of(node, position) for node, position in segment.copied_writes]
    if max(sizes, default=0) > limits.small_write_bytes or sum(sizes) > limits.copied_bytes:
        yield f"copies {sum(sizes)} bytes, {max(sizes)} in one write"


def _foreign_write_problems(nodes: list[Node], writes: dict[int, tuple[int, ...]]) -> Iterator[str]:
    for node in nodes[:-1]:
        if any(position in node.foreign for position in writes.get(node.id, ())):
            yield f"goes on behind the write of node {node.id}, where Python waits"


def _summary_problems(segment: Segment, nodes: list[Node], graph: TraceGraph, limits: Limits) -> Iterator[str]:
    if segment.fetches != tuple(node.id for node in nodes if node.kind == OpKind.FETCH):
        yield f"lists the fetches {segment.fetches}"
    if segment.feeds != tuple(node.id for node in nodes if needs_python(graph, node)):
        yield f"lists the feeds {segment.feeds}"
    ops = sum(node.kind == OpKind.COMPUTE for node in nodes)
    if segment.compile != (segment.kind != "python" and ops >= limits.min_ops and not segment.in_loop):
        yield f"has compile={segment.compile} with {ops} ops"
