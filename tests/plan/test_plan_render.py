"""What a plan looks like in print."""

from __future__ import annotations

import dataclasses

from coexec.graph.merge import merge
from coexec.graph.tracegraph import TraceGraph
from coexec.plan.cases import assign_cases
from coexec.plan.render import render_plan
from coexec.plan.segments import cut_segments
from coexec.records import OpKind
from tests.graph.programs import op, trace


def _graph() -> TraceGraph:
    graph = TraceGraph()
    write = dataclasses.replace(op(11, -1, 0), writes=(0,), aliases=(0,))
    fetch = dataclasses.replace(op(50, 1, kind=OpKind.FETCH), n_outputs=0)
    for number, branch in ((1, 20), (2, 30), (3, 0)):
        ops = [op(10, -1), write, *([op(branch, 1)] if branch else []), op(40, 1, number=number), fetch]
        merge(graph, trace(*ops))
    return graph


def test_a_plan_prints_levels_blocks_and_segments() -> None:
    graph = _graph()
    plan = assign_cases(graph)
    segments = cut_segments(graph, plan, lambda node, position: 1 << 10)
    assert render_plan(plan, graph, segments).splitlines() == [
        "plan of 3 Switch-Cases, 4 basic blocks",
        "  level 0: always",
        "    block 0: %2..%3 (2 nodes), taken 3 of 3",
        "      segment 0 functional: %2..%3 (2 nodes); copies %3[0]; not compiled",
        "  level 1: Case Select on %4, %7 or no-op",
        "    block 2: %4, taken 1 of 3",
        "      segment 2 functional: %4; not compiled",
        "    block 1: %7, taken 1 of 3",
        "      segment 1 functional: %7; not compiled",
        "  level 2: always",
        "    block 3: %5..%6 (2 nodes), taken 3 of 3",
        "      segment 3 functional: %5..%6 (2 nodes); fetches %6; fed at %5; not compiled",
    ]


def test_a_plan_prints_without_segments() -> None:
    graph = _graph()
    text = render_plan(assign_cases(graph), graph)
    assert "block 3" in text
    assert "segment" not in text


def test_long_lists_are_cut() -> None:
    graph = TraceGraph()
    for number in (1, 2):
        merge(graph, trace(*(op(10 + k, k - 1, number=number) for k in range(9))))
    plan = assign_cases(graph)
    segments = cut_segments(graph, plan, lambda node, position: 0)
    assert "fed at %2, %3, %4, %5, %6, %7 and 3 more" in render_plan(plan, graph, segments)
