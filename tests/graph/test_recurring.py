"""What only the first trace did is in no plan; whole later paths are."""

from __future__ import annotations

from hypothesis import given, settings

from coexec.graph.merge import merge
from coexec.graph.recurring import recurring
from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import assign_cases
from coexec.plan.check import check_plan, check_segments
from coexec.plan.segments import cut_segments
from coexec.records import Trace
from tests.graph.programs import FOLDED_TRACES, TRACES, chain


def graph_of(*traces: Trace) -> TraceGraph:
    graph = TraceGraph()
    for one in traces:
        merge(graph, one)
    return graph


def test_the_first_iteration_s_own_way_is_no_branch_of_the_plan() -> None:
    graph = graph_of(chain(10, 20, 40, 50), chain(10, 30, 40, 50), chain(10, 30, 40, 50))
    assert [case.is_branch for case in assign_cases(graph).switch_cases] == [False, True, False]
    plan = assign_cases(recurring(graph))
    assert [block.nodes for block in plan.blocks] == [tuple(merge(graph, chain(10, 30, 40, 50)).nodes)]


def test_an_op_that_the_first_iteration_left_out_is_no_branch_either() -> None:
    plan = assign_cases(recurring(graph_of(chain(10, 40), chain(10, 30, 40))))
    assert [case.is_branch for case in plan.switch_cases] == [False]


def test_the_first_path_taken_again_is_planned() -> None:
    graph = graph_of(chain(10, 20, 40), chain(10, 30, 40), chain(10, 20, 40))
    assert recurring(graph) is graph


def test_one_trace_is_all_there_is_to_plan_for() -> None:
    graph = graph_of(chain(10, 20))
    assert recurring(graph) is graph


@given(TRACES | FOLDED_TRACES)
@settings(max_examples=100, deadline=None)
def test_all_later_paths_are_covered_by_a_plan_of_the_part(traces: list[Trace]) -> None:
    graph = TraceGraph()
    paths = [merge(graph, one).nodes for one in traces]
    part = recurring(graph)
    later = {node for path in paths[1:] for node in path}
    if part is not graph:
        assert {node.id for node in part.nodes[2:] if node.parents} == later
        assert set(part.edge_visits) == set(graph.edge_visits) - graph.first_only
    plan = assign_cases(part)
    check_plan(plan, part)
    check_segments(cut_segments(part, plan, lambda node, position: 0), plan, part, lambda node, position: 0)
