"""Loops as strongly connected components, against plain reachability."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coexec.graph.components import loop_components, strongly_connected
from coexec.graph.merge import merge
from coexec.graph.tracegraph import TraceGraph
from tests.graph.programs import folded_chain

GRAPHS = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=4), min_size=size, max_size=size)
)


def reached(successors: list[list[int]], start: int) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for following in successors[todo.pop()]:
            if following not in found:
                found.add(following)
                todo.append(following)
    return found


@given(GRAPHS)
@settings(max_examples=150, deadline=None)
def test_components_are_what_reaches_each_other_in_reverse_topological_order(successors: list[list[int]]) -> None:
    found = strongly_connected(successors)
    to = [reached(successors, vertex) for vertex in range(len(successors))]
    expected = {frozenset(other for other in to[vertex] if vertex in to[other]) for vertex in range(len(successors))}
    assert {frozenset(component) for component in found} == expected
    assert sorted(vertex for component in found for vertex in component) == list(range(len(successors)))
    place = {vertex: index for index, component in enumerate(found) for vertex in component}
    assert all(place[following] <= place[vertex] for vertex in place for following in successors[vertex])


def test_a_long_chain_needs_no_recursion() -> None:
    chain = [[vertex + 1] for vertex in range(20_000)] + [[0]]
    assert len(strongly_connected(chain)) == 1


def test_loops_of_a_graph_are_named_by_their_nodes() -> None:
    graph = TraceGraph()
    merge(graph, folded_chain(10, 100, 101, 100, 101, 20, 200, 200, 30))
    assert sorted(sorted(nodes) for nodes in loop_components(graph)) == [[3, 4], [6]]
