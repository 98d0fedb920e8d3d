"""Plans and segments broken by hand: the checkers name what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coexec.errors import InternalError
from coexec.graph.merge import merge
from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import BasicBlock, Plan, SwitchCase, assign_cases
from coexec.plan.check import check_plan, check_segments, find_plan_problems, find_segment_problems
from coexec.plan.segments import Segment, Segments, cut_segments
from coexec.records import OpKind, Trace
from tests.graph.programs import op, trace

SMALL, LARGE = 1 << 10, 1 << 20


def branching() -> tuple[TraceGraph, Plan]:
    """10 11 -> {20, 30} -> 40: blocks (2, 3), (4), (6), (5) on levels 0, 1, 1, 2."""
    graph = TraceGraph()
    merge(graph, trace(op(10, -1), op(11, 0), op(20, 1), op(40, 2)))
    merge(graph, trace(op(10, -1), op(11, 0), op(30, 1), op(40, 2)))
    return graph, assign_cases(graph)


def with_blocks(plan: Plan, *blocks: tuple[int, ...]) -> Plan:
    """Returns `plan` with other blocks, on the levels of the old ones, and the indexes that belong to them."""
    new = tuple(BasicBlock(number, nodes) for number, nodes in enumerate(blocks))
    block_of = [-1] * len(plan.block_of)
    for block in new:
        for node in block.nodes:
            block_of[node] = block.id
    levels = tuple(plan.level_of[: len(new)])
    cases = tuple(
        dataclasses.replace(switch_case, cases=tuple(block for block in new if levels[block.id] == switch_case.level))
        for switch_case in plan.switch_cases
    )
    return Plan(cases, new, tuple(block_of), levels)


def swap_levels(plan: Plan, a: int, b: int) -> Plan:
    """Returns `plan` with two Switch-Cases in each other's place."""
    order = list(range(len(plan.switch_cases)))
    order[a], order[b] = order[b], order[a]
    cases = tuple(dataclasses.replace(plan.switch_cases[old], level=new) for new, old in enumerate(order))
    return dataclasses.replace(plan, switch_cases=cases, level_of=tuple(order.index(level) for level in plan.level_of))


def skip(plan: Plan, level: int) -> Plan:
    cases = list(plan.switch_cases)
    cases[level] = dataclasses.replace(cases[level], may_skip=not cases[level].may_skip)
    return dataclasses.replace(plan, switch_cases=tuple(cases))


def test_the_example_is_sound() -> None:
    graph, plan = branching()
    check_plan(plan, graph)
    assert sorted(block.nodes for block in plan.blocks) == [(2, 3), (4,), (5,), (6,)]


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda plan: with_blocks(plan, (2, 3), (6,), (4,)), "do not hold every node once"),
        (lambda plan: with_blocks(plan, (2, 3), (6,), (4, 3), (5,)), "do not hold every node once"),
        (lambda plan: with_blocks(plan, (3, 2), (6,), (4,), (5,)), "goes from 3 to 2, which is no chain"),
        (lambda plan: with_blocks(plan, (2, 3, 4), (6,), (), (5,)), "goes from 3 to 4, which is no chain"),
        (lambda plan: with_blocks(plan, (2, 3), (6,), (4,), ()), "block 3 is empty"),
        (lambda plan: dataclasses.replace(plan, block_of=(0,) * 7), "`block_of` does not say"),
        (lambda plan: dataclasses.replace(plan, level_of=(0, 1, 1, 1)), "has another level"),
        (lambda plan: dataclasses.replace(plan, switch_cases=plan.switch_cases[:2]), "do not hold every block once"),
        (lambda plan: swap_levels(plan, 1, 2), "goes from level 2 to level 1"),
        (lambda plan: swap_levels(plan, 1, 2), "a remembered path is not covered"),
        (lambda plan: skip(plan, 1), "has may_skip=True, and the edges say otherwise"),
        (lambda plan: dataclasses.replace(plan, switch_cases=()), "a remembered path is not covered"),
    ],
)
def test_a_broken_plan_is_reported(broken: Any, complaint: str) -> None:
    graph, plan = branching()
    problems = list(find_plan_problems(broken(plan), graph))
    assert any(complaint in problem for problem in problems), problems
    with pytest.raises(InternalError, match="Malformed plan"):
        check_plan(broken(plan), graph)


def test_a_chain_cut_in_two_blocks_is_not_maximal() -> None:
    graph = TraceGraph()
    merge(graph, trace(op(10, -1), op(11, 0)))
    blocks = (BasicBlock(0, (2,)), BasicBlock(1, (3,)))
    levels = tuple(SwitchCase(level, (block,), False) for level, block in enumerate(blocks))
    plan = Plan(levels, blocks, (-1, -1, 0, 1), (0, 1))
    assert list(find_plan_problems(plan, graph)) == ["block 1 is not maximal: node 2 belongs to it"]


# Segments -----------------------------------------------------------------------------------------------------------


def write(location: int, *inputs: int) -> Any:
    return dataclasses.replace(op(location, *inputs), writes=(0,), aliases=(0,))


def training() -> Trace:
    """Work (2..6), a small write (7), a FETCH (8), a SYNC (9), work (10..19), a large write (20)."""
    work = [op(location, location - 11) for location in range(10, 15)]
    middle = [
        write(20, -1, 4),
        dataclasses.replace(op(21, 4, kind=OpKind.FETCH), n_outputs=0),
        op(22, kind=OpKind.SYNC),
    ]
    more = [op(30, 4), *(op(location, location - 23) for location in range(31, 40))]
    return trace(*work, *middle, *more, write(40, -1, 17))


def bytes_of(node: int, position: int) -> int:
    return LARGE if node == 20 else SMALL


def planned() -> tuple[TraceGraph, Plan, Segments]:
    graph = TraceGraph()
    merge(graph, training())
    plan = assign_cases(graph)
    return graph, plan, cut_segments(graph, plan, bytes_of)


def changed(segments: Segments, number: int, **values: Any) -> Segments:
    """Returns `segments` with fields of one segment replaced."""
    new = list(segments.segments)
    new[number] = dataclasses.replace(new[number], **values)
    return dataclasses.replace(segments, segments=tuple(new))


def joined(segments: Segments, number: int) -> Segments:
    """Returns `segments` with segment `number` continued by the next one's nodes."""
    first, second = segments.segments[number : number + 2]
    whole = Segment(
        number, 0, first.nodes + second.nodes, first.kind, first.fetches + second.fetches, first.feeds + second.feeds,
        first.copied_writes + second.copied_writes, first.compile,
    )  # fmt: skip
    rest = [dataclasses.replace(later, id=later.id - 1) for later in segments.segments[number + 2 :]]
    new = (*segments.segments[:number], whole, *rest)
    segment_of = [-1] * len(segments.segment_of)
    for segment in new:
        for node in segment.nodes:
            segment_of[node] = segment.id
    return Segments(new, (tuple(range(len(new))),), tuple(segment_of))


def test_the_example_has_every_kind_and_is_sound() -> None:
    graph, plan, segments = planned()
    check_segments(segments, plan, graph, bytes_of)
    assert [(segment.kind, segment.nodes[0]) for segment in segments.segments] == [
        ("functional", 2), ("python", 9), ("functional", 10), ("commit", 20),
    ]  # fmt: skip
    assert segments.segments[0].copied_writes == ((7, 0),)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda segments: changed(segments, 1, id=5), "segment 5 stands at index 1"),
        (lambda segments: changed(segments, 0, nodes=(2, 3, 4, 5, 6, 8)), "are not its nodes in order"),
        (lambda segments: changed(segments, 2, block=3), "is empty or belongs to block 3, not 0"),
        (lambda segments: dataclasses.replace(segments, segment_of=(0,) * 21), "`segment_of` does not say"),
        (lambda segments: joined(segments, 0), "holds nodes [9], which Python runs"),
        (lambda segments: joined(segments, 1), "is not one SYNC or BARRIER node, but (9, 10, 11"),
        (lambda segments: joined(segments, 2), "copies the writes (); its external writes are ((20, 0),)"),
        (lambda segments: changed(segments, 0, kind="commit", copied_writes=()), "holds the FETCH 8, at which Python"),
        (lambda segments: changed(segments, 3, copied_writes=((20, 0),)), "copies the writes ((20, 0),)"),
        (lambda segments: changed(segments, 3, kind="functional", copied_writes=((20, 0),)), "copies 1048576 bytes"),
        (lambda segments: changed(segments, 0, fetches=()), "lists the fetches ()"),
        (lambda segments: changed(segments, 0, feeds=(2,)), "lists the feeds (2,)"),
        (lambda segments: changed(segments, 3, compile=True), "has compile=True with 1 ops"),
        (lambda segments: changed(segments, 0, compile=False), "has compile=False with 6 ops"),
    ],
)
def test_broken_segments_are_reported(broken: Any, complaint: str) -> None:
    graph, plan, segments = planned()
    problems = list(find_segment_problems(broken(segments), plan, graph, bytes_of))
    assert any(complaint in problem for problem in problems), problems
    with pytest.raises(InternalError, match="Malformed segments"):
        check_segments(broken(segments), plan, graph, bytes_of)


def test_a_feed_behind_a_fetch_and_a_choice_inside_are_reported() -> None:
    graph, plan, _ = planned()
    graph.nodes[9].kind = OpKind.COMPUTE
    graph.nodes[10].fed.add(0)
    graph.nodes[12].ambiguous.add(0)
    whole = Segment(0, 0, plan.blocks[0].nodes, "functional", (8,), (10, 12), ((7, 0), (20, 0)), True)
    segments = Segments((whole,), ((0,),), (-1, -1, *(0 for _ in whole.nodes)))
    assert list(find_segment_problems(segments, plan, graph, lambda node, position: SMALL)) == [
        "segment 0 (functional) needs a word from Python for node 10 after the FETCH 8",
        "segment 0 (functional) needs a word from Python for node 12 after the FETCH 8",
        "segment 0 (functional) makes a value that Python picks at input 0 of node 12",
    ]
