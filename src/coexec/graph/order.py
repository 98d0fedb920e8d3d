"""Topological ranks: keep the TraceGraph acyclic, but for back edges, without walking it for every edge.

Every forward edge goes from a lower rank to a higher one, so a path from b to a can only lead through ranks below a's.
Back edges go the other way and are in no such path. Ranks are spaced (`stride`), so that a branch fits between two
neighbours and a push stops at the first gap.
"""

from __future__ import annotations

import heapq

from coexec.errors import InternalError
from coexec.graph.tracegraph import Node, TraceGraph


def next_place(parent: Node) -> tuple[int, int]:
    """Returns (rank, stride) for a new child: far behind a leaf, close behind a node from which a branch leaves."""
    if not parent.children:
        return parent.rank + parent.stride, parent.stride
    narrow = max(1, parent.stride >> 8)
    return parent.rank + narrow, narrow


def closes_cycle(graph: TraceGraph, at: int, target: int, behind: set[int]) -> bool:
    """True if an edge `at` -> `target` would close a cycle of forward edges.

    Args:
        behind: nodes known to reach `at` over forward edges. A discovered one is added: it will also reach whatever
            follows `at`, so a trace that revisits a long stretch in another order pays for one search, not for one per
            op.
    """
    if target in behind or target == at:
        return True
    nodes = graph.nodes
    limit = nodes[at].rank
    if nodes[target].rank >= limit:
        return False
    stack, seen = [target], {target}
    while stack:
        parent = nodes[stack.pop()]
        for child in parent.children:
            rank = nodes[child].rank
            if rank <= parent.rank:  # a back edge
                continue
            if child == at or child in behind:
                behind.add(target)
                return True
            if child not in seen and rank < limit:
                seen.add(child)
                stack.append(child)
    return False


def link(graph: TraceGraph, parent: int, child: int) -> None:
    """Adds an edge that `closes_cycle` allowed, and repairs the ranks behind it."""
    nodes = graph.nodes
    nodes[parent].children.append(child)
    nodes[child].parents.append(parent)
    if nodes[child].rank <= nodes[parent].rank:
        _push(graph, parent, child)


def link_back(graph: TraceGraph, parent: int, child: int) -> None:
    """Adds an edge that `closes_cycle` found to close one: a loop begins another pass."""
    graph.nodes[parent].children.append(child)
    graph.nodes[child].parents.append(parent)
    graph.back_edges.add((parent, child))


def _push(graph: TraceGraph, parent: int, first: int) -> None:
    """Raises `first` above `parent` and whatever is then in the way, each node once, in the old topological order."""
    nodes = graph.nodes
    floor = {first: nodes[parent].rank + 1}
    heap = [(nodes[first].rank, first)]
    while heap:
        node = nodes[heapq.heappop(heap)[1]]
        node.rank = floor.pop(node.id)
        for child in node.children:
            if nodes[child].rank > node.rank or (node.id, child) in graph.back_edges:
                continue
            if child == parent:  # ranks would rise for ever
                raise InternalError(f"Edge {(parent, first)} was added although it closes a cycle.")
            if child not in floor:
                heapq.heappush(heap, (nodes[child].rank, child))
            floor[child] = max(floor.get(child, 0), node.rank + 1)
