"""What of a TraceGraph a step is planned for: all but what only its first trace did.

The first iteration of a training program is like no other: optimizers create their state, `.grad` is None, caches are
empty. An edge that only the first trace took would be a branch for ever, and cut a segment at both of its ends: SGD
with momentum has one per parameter. It stays in the TraceGraph, and an iteration that takes it is followed, replayed,
and makes it an edge like others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from coexec.graph.tracegraph import END, EXTERNAL_VALUE, START, Edge, Node, Producer, SeenPath, TraceGraph


def recurring(graph: TraceGraph) -> TraceGraph:
    """Returns the part of `graph` that some later iteration took; `graph` itself if that is all, or nothing.

    A graph with back edges is returned as it is: it was begun anew when its loops were folded, long after the step's
    first iteration.

    Node ids are kept: nodes off that part have no edges. All others lie behind START, since whole paths are kept.
    """
    kept = graph.edge_visits.keys() - graph.first_only
    if not graph.first_only or graph.back_edges or not any(parent == START for parent, _ in kept):
        return graph
    passed = {child for _, child in kept}
    part = TraceGraph()
    part.nodes = [_in_part(node, kept, passed) for node in graph.nodes]
    part.by_key, part.traces = graph.by_key, graph.traces
    part.edge_visits = {edge: visits for edge, visits in graph.edge_visits.items() if edge in kept}
    part.paths = {digest: path for digest, path in graph.paths.items() if _is_kept(path, kept)}
    return part


def _is_kept(path: SeenPath, kept: set[Edge]) -> bool:
    walk = (START, *path.nodes, *((END,) if path.complete else ()))
    return kept.issuperset(itertools.pairwise(walk))


def _in_part(node: Node, kept: set[Edge], passed: set[int]) -> Node:
    inputs = [{value for value in allowed if _is_made(value, passed)} for allowed in node.inputs]
    decided = {k for k in node.ambiguous if len(inputs[k]) < min(2, len(node.inputs[k]))}
    return replace(
        node,
        children=[child for child in node.children if (node.id, child) in kept],
        parents=[parent for parent in node.parents if (parent, node.id) in kept],
        inputs=inputs,
        ambiguous=node.ambiguous - decided,
    )


def _is_made(value: Producer, passed: set[int]) -> bool:
    return value == EXTERNAL_VALUE or value[0] in passed
