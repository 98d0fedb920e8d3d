"""A TraceGraph broken by hand: the checker names what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coexec.errors import InternalError
from coexec.graph.check import check_graph, find_problems
from coexec.graph.merge import merge
from coexec.graph.tracegraph import END, EXTERNAL_VALUE, SeenPath, TraceGraph
from tests.graph.programs import chain, op, trace


def _branching() -> TraceGraph:
    """10 -> {20, 30} -> 40: nodes 2, 3, 5, 4."""
    graph = TraceGraph()
    merge(graph, chain(10, 20, 40))
    merge(graph, chain(10, 30, 40))
    return graph


def _add_edge(graph: TraceGraph, parent: int, child: int) -> None:
    graph.nodes[parent].children.append(child)
    graph.nodes[child].parents.append(parent)
    graph.edge_visits[parent, child] = 1


def _cycle(graph: TraceGraph) -> None:
    _add_edge(graph, 4, 2)


def _half_edge(graph: TraceGraph) -> None:
    graph.nodes[3].children.append(5)


def _uncounted_edge(graph: TraceGraph) -> None:
    del graph.edge_visits[2, 5]


def _untravelled_edge(graph: TraceGraph) -> None:
    graph.edge_visits[2, 5] = 0


def _doubled_edge(graph: TraceGraph) -> None:
    graph.nodes[2].children.append(3)


def _rank(graph: TraceGraph) -> None:
    graph.nodes[2].rank = graph.nodes[4].rank


def _id(graph: TraceGraph) -> None:
    graph.nodes[3].id = 7


def _after_end(graph: TraceGraph) -> None:
    _add_edge(graph, END, 5)


def _unreachable(graph: TraceGraph) -> None:
    graph.nodes[5].parents.clear()


def _key_index(graph: TraceGraph) -> None:
    graph.by_key.popitem()


def _no_producer(graph: TraceGraph) -> None:
    graph.nodes[4].inputs[0].clear()


def _late_producer(graph: TraceGraph) -> None:
    graph.nodes[2].inputs[0].add((4, 0))


def _missing_output(graph: TraceGraph) -> None:
    graph.nodes[4].inputs[0].add((3, 1))


def _fed_position(graph: TraceGraph) -> None:
    graph.nodes[4].fed.add(5)


def _foreign_position(graph: TraceGraph) -> None:
    graph.nodes[4].foreign.add(0)


def _ambiguous_position(graph: TraceGraph) -> None:
    graph.nodes[3].ambiguous.add(0)


def _visits(graph: TraceGraph) -> None:
    graph.nodes[4].visits = 1


def _path_edge(graph: TraceGraph) -> None:
    graph.paths[1] = SeenPath((2, 4), True, 1)


def _back_edge_forward(graph: TraceGraph) -> None:
    graph.back_edges.add((2, 3))


def _back_edge_nowhere(graph: TraceGraph) -> None:
    graph.back_edges.add((4, 3))


def _back_edge_unfolded(graph: TraceGraph) -> None:
    _add_edge(graph, 4, 2)
    graph.back_edges.add((4, 2))


def _path_data(graph: TraceGraph) -> None:
    _add_edge(graph, 2, 4)
    graph.paths[1] = SeenPath((2, 4), True, 1)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (_cycle, "on or behind a cycle"),
        (_half_edge, "known to one end only"),
        (_uncounted_edge, "not in both"),
        (_untravelled_edge, "never taken"),
        (_doubled_edge, "listed twice"),
        (_rank, "does not go to a higher rank"),
        (_id, "stands at index 3"),
        (_after_end, "END has children"),
        (_unreachable, "not behind START"),
        (_key_index, "by_key"),
        (_no_producer, "allows no producer at input 0"),
        (_late_producer, "no output of an earlier node"),
        (_missing_output, "no output of an earlier node"),
        (_fed_position, "is fed number 5 of 1"),
        (_foreign_position, "which is never external"),
        (_ambiguous_position, "which has no alternatives"),
        (_visits, "was visited 1 times, entered 2 times"),
        (_path_edge, "which is no edge"),
        (_path_data, "nobody produces input 0 of node 4"),
        (_back_edge_forward, "back edge (2, 3) begins no pass of a folded loop"),
        (_back_edge_nowhere, "back edge (4, 3) is no edge"),
        (_back_edge_unfolded, "back edge (4, 2) begins no pass of a folded loop"),
    ],
)
def test_a_broken_graph_is_reported(break_it: Callable[[TraceGraph], None], complaint: str) -> None:
    graph = _branching()
    check_graph(graph)
    break_it(graph)
    problems = list(find_problems(graph))
    assert any(complaint in problem for problem in problems), problems
    with pytest.raises(InternalError, match="Malformed TraceGraph"):
        check_graph(graph)


def test_an_empty_graph_is_sound() -> None:
    check_graph(TraceGraph())


def test_leaving_more_often_than_entering_is_reported() -> None:
    graph = TraceGraph()
    merge(graph, trace(op(10, -1), op(20, 0)))
    graph.edge_visits[2, 3] = 2
    assert "node 2 was visited 1 times, left 2 times" in list(find_problems(graph))
    assert graph.nodes[2].inputs == [{EXTERNAL_VALUE}]
