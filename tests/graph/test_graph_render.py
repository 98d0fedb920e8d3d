"""What a TraceGraph looks like in print."""

from __future__ import annotations

import dataclasses

from coexec.graph.merge import merge
from coexec.graph.render import render_graph, to_dot
from coexec.graph.tracegraph import TraceGraph
from coexec.records import EXTERNAL, OpKind, ValueRef
from tests.graph.programs import op, trace


def _graph() -> TraceGraph:
    """A branch, a fed number, a write to an external and a FETCH."""
    graph = TraceGraph()
    for number, branch in ((0.1, False), (0.2, True)):
        ops = [op(10, -1), *([op(20, 0)] if branch else []), op(30, -1, int(branch), number=number)]
        ops[-1] = dataclasses.replace(ops[-1], writes=(0,), aliases=(0,), random=True)
        ops.append(op(40, len(ops) - 1, kind=OpKind.FETCH))
        merge(graph, trace(*ops))
    return graph


def test_text_lists_nodes_in_topological_order_with_what_varies() -> None:
    assert render_graph(_graph(), lambda location: f"step.py:{location}").splitlines() == [
        "TraceGraph of 2 traces: 4 nodes, 6 edges",
        "  START  -> %2(2)",
        "  %2 = test::op10(ext, 1)  -> %3(1) %5(1)  # step.py:10",
        "  %5 = test::op20(%2, 1)  -> %3(1)  # step.py:20",
        "  %3 = test::op30(ext!, %2|%5, ~0.2)  random  -> %4(2)  # step.py:30",
        "  %4 = test::op40(%3, 1)  fetch  -> END(2)  # step.py:40",
        "  END",
    ]


def test_text_names_foreign_memory_and_choices_made_in_python() -> None:
    graph = TraceGraph()
    foreign = dataclasses.replace(op(10, -1), inputs=(ValueRef(EXTERNAL, 2),))
    merge(graph, trace(foreign, op(20, 0), op(30, 0)))
    merge(graph, trace(foreign, op(20, 0), op(30, 1)))
    text = render_graph(graph)
    assert "%2 = test::op10(ext, 1)  foreign=[0]" in text
    assert "%4 = test::op30(%2|%3, 1)  ambiguous=[0]" in text


def test_dot_has_every_node_and_counted_edge() -> None:
    dot = to_dot(_graph(), lambda location: f'"step".py:{location}')
    assert dot.startswith("digraph TraceGraph {")
    assert 'n2 -> n5 [label="1"];' in dot
    assert 'n4 [label="%4 = test::op40(%3, 1)\\n\\"step\\".py:40", style=filled, fillcolor=lightblue];' in dot
    assert dot.count("->") == 6
