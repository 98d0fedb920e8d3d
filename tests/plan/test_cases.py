"""The case assignment: random programs against their paths, and named shapes by hand."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given, settings

from coexec.errors import InternalError
from coexec.graph.merge import merge
from coexec.graph.tracegraph import END, START, TraceGraph, node_key
from coexec.plan.cases import Plan, assign_cases, run_in_order
from coexec.plan.check import check_plan, check_segments
from coexec.plan.loops import MAX_NESTING, NO_LOOP
from coexec.plan.segments import cut_segments
from coexec.records import Trace
from tests.graph.programs import FOLDED_TRACES, TRACES, chain, cut_short, folded_chain, op


def graph_of(*traces: Trace) -> TraceGraph:
    graph = TraceGraph()
    for one in traces:
        merge(graph, one)
    return graph


def levels(plan: Plan) -> list[list[tuple[int, ...]]]:
    return [[block.nodes for block in switch_case.cases] for switch_case in plan.switch_cases]


@given(TRACES)
@settings(max_examples=50, deadline=None)
def test_running_the_list_in_order_gives_back_every_trace(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    plan = assign_cases(graph)
    check_plan(plan, graph)
    for path in paths:
        taken = [block for block in run_in_order(plan, path) if block is not None]
        assert tuple(itertools.chain.from_iterable(block.nodes for block in taken)) == path


@given(FOLDED_TRACES)
@settings(max_examples=150, deadline=None)
def test_traces_with_loops_are_the_list_run_in_order_with_ranges_run_again(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    plan = assign_cases(graph)
    check_plan(plan, graph)
    for path in paths:
        taken = [block for block in run_in_order(plan, path) if block is not None]
        assert tuple(itertools.chain.from_iterable(block.nodes for block in taken)) == path
    segments = cut_segments(graph, plan, lambda node, position: 0)
    check_segments(segments, plan, graph, lambda node, position: 0)


@given(TRACES)
@settings(max_examples=40, deadline=None)
def test_levels_are_longest_paths_and_blocks_are_maximal_chains(traces: list[Trace]) -> None:
    graph = graph_of(*traces)
    plan = assign_cases(graph)
    after: dict[int, set[int]] = {block.id: set() for block in plan.blocks}
    joined = set()
    for parent, child in graph.edge_visits:
        if START in (parent, child) or END in (parent, child):
            continue
        if plan.block_of[parent] == plan.block_of[child]:
            joined.add((parent, child))
        else:
            after[plan.block_of[child]].add(plan.block_of[parent])

    @functools.cache
    def longest(block: int) -> int:
        return 1 + max((longest(before) for before in after[block]), default=-1)

    assert plan.level_of == tuple(longest(block.id) for block in plan.blocks)
    for parent, child in graph.edge_visits:
        alone = graph.nodes[parent].children == [child] and graph.nodes[child].parents == [parent]
        assert ((parent, child) in joined) == (alone and parent != START and child != END)


@given(TRACES)
@settings(max_examples=40, deadline=None)
def test_a_step_that_raises_anywhere_is_covered_too(traces: list[Trace]) -> None:
    graph = TraceGraph()
    for one in traces:
        merge(graph, cut_short(one, len(one.ops) // 2))
        merge(graph, one)
    check_plan(assign_cases(graph), graph)


def test_a_straight_step_is_one_block_without_case_select() -> None:
    plan = assign_cases(graph_of(chain(10, 20, 30)))
    assert levels(plan) == [[(2, 3, 4)]]
    assert not plan.switch_cases[0].is_branch


def test_a_branch_is_a_switch_case_between_what_is_common() -> None:
    plan = assign_cases(graph_of(chain(10, 20, 21, 40), chain(10, 30, 40)))
    assert levels(plan) == [[(2,)], [(3, 4), (6,)], [(5,)]]
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, False, False]
    assert plan.switch_cases[1].selectors == (3, 6)
    assert plan.switch_cases[1].is_branch


def test_an_if_without_else_may_be_skipped() -> None:
    plan = assign_cases(graph_of(chain(10, 20, 40), chain(10, 40)))
    assert levels(plan) == [[(2,)], [(3,)], [(4,)]]
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, True, False]


def test_a_short_branch_beside_a_long_one_skips_levels() -> None:
    """10 -> {20 -> {21, 22} -> 23, 30} -> 40: the path by 30 runs no-ops where the other has more levels."""
    plan = assign_cases(graph_of(chain(10, 20, 21, 23, 40), chain(10, 20, 22, 23, 40), chain(10, 30, 40)))
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, False, True, True, False]
    assert len(plan.switch_cases[1].cases) == 2


def test_loops_with_different_trip_counts_are_levels_that_may_be_skipped() -> None:
    traces = [chain(10, *range(100, 100 + trips), 50) for trips in (1, 2, 3)]
    plan = assign_cases(graph_of(*traces))
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, True, True, False]


def test_a_folded_loop_is_a_while_over_a_range_of_levels() -> None:
    plan = assign_cases(graph_of(folded_chain(10, 100, 101, 50), folded_chain(10, 100, 101, 100, 101, 50)))
    assert levels(plan) == [[(2,)], [(3, 4)], [(5,)]]
    (loop,) = plan.loops
    assert (loop.first_level, loop.last_level, loop.back_edges, loop.conds) == (1, 1, ((4, 3),), (4,))
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, False, False]
    passes = list(run_in_order(plan, (2, 3, 4, 3, 4, 3, 4, 5)))
    assert [block.nodes for block in passes if block] == [(2,), (3, 4), (3, 4), (3, 4), (5,)]


def test_a_loop_left_in_its_middle_has_a_loop_cond_there() -> None:
    """`while True: body; if c: break; rest`, and a path that never enters it."""
    plan = assign_cases(graph_of(folded_chain(10, 100, 101, 100, 50), folded_chain(10, 50)))
    (loop,) = plan.loops
    assert (loop.first_level, loop.last_level, loop.conds) == (1, 2, (3,))
    assert [switch_case.may_skip for switch_case in plan.switch_cases] == [False, True, True, False]


def test_nested_loops_have_nested_ranges() -> None:
    inner = [101, 102] * 2
    plan = assign_cases(graph_of(folded_chain(10, 100, *inner, 103, 100, *inner, *inner, 103, 50)))
    outer, nested = plan.loops
    assert (outer.parent, nested.parent) == (NO_LOOP, outer.id)
    assert (outer.first_level, outer.last_level) == (1, 3)
    assert (nested.first_level, nested.last_level) == (2, 2)
    assert plan.loop_of_block() == (NO_LOOP, outer.id, nested.id, outer.id, NO_LOOP)


def test_what_follows_a_loop_lies_behind_its_whole_range() -> None:
    """The loop is left from its first block; its longest body has three levels."""
    body = folded_chain(100, 101, 103, 100, 102, 103, 100, 50)
    plan = assign_cases(graph_of(body))
    (loop,) = plan.loops
    assert plan.level_of[plan.block_of[graph_of(body).by_key[node_key(op(50, 0))][0]]] == loop.last_level + 1


def test_a_tangle_of_jumps_does_not_nest_for_ever() -> None:
    order = random.Random(3)
    places = [order.randrange(100, 140) for _ in range(2000)]
    graph = graph_of(folded_chain(10, *places, 50))
    plan = assign_cases(graph)
    check_plan(plan, graph)
    assert len(plan.loops) > 1
    depth = {NO_LOOP: 0}
    for loop in plan.loops:
        depth[loop.id] = depth[loop.parent] + 1
    assert max(depth.values()) <= MAX_NESTING + 1


def test_an_empty_graph_and_an_empty_step_have_an_empty_list() -> None:
    for graph in (TraceGraph(), graph_of(chain())):
        plan = assign_cases(graph)
        check_plan(plan, graph)
        assert plan.switch_cases == ()
        assert list(run_in_order(plan, ())) == []


def test_a_path_that_the_list_does_not_cover_is_our_bug() -> None:
    plan = assign_cases(graph_of(chain(10, 20, 30, 50), chain(10, 40, 50)))
    with pytest.raises(InternalError, match="leaves block"):
        list(run_in_order(plan, (2, 3, 5)))
    with pytest.raises(InternalError, match="has no no-op"):
        list(run_in_order(plan, (2, 5)))
    with pytest.raises(InternalError, match="in no Switch-Case"):
        list(run_in_order(plan, (2, 3, 4, 5, 6)))


def _calls(work: Callable[[], object]) -> int:
    """Counts function calls, in Python and C: the same on every machine."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_merging_and_planning_a_long_chain_is_linear() -> None:
    def build(length: int) -> int:
        one = chain(*range(10, 10 + length))

        def work() -> None:
            graph = graph_of(one, one)
            cut_segments(graph, assign_cases(graph), lambda node, position: 0)

        return _calls(work)

    small, large = build(500), build(2000)
    assert large < 4.2 * small
    assert large < 150 * 2000


def test_a_whole_reversal_is_searched_once_and_not_once_per_op() -> None:
    def build(length: int) -> int:
        there = chain(*range(10, 10 + length))
        back = chain(*range(9 + length, 9, -1))
        graph = graph_of(there)
        return _calls(lambda: merge(graph, back))

    small, large = build(200), build(800)
    assert large < 4.5 * small


def test_merging_many_skips_is_linear() -> None:
    """Every branch merges back at once: the ranks leave room, so no push runs to the end of the graph."""

    def build(length: int) -> int:
        whole = list(range(10, 10 + length))
        skipping = [location for location in whole if location % 10]
        swapped = [location + (5000 if location % 10 == 5 else 0) for location in whole]
        traces = [chain(*locations) for locations in (whole, skipping, swapped)]
        return _calls(lambda: graph_of(*traces))

    small, large = build(300), build(1200)
    assert large < 4.5 * small
