"""The checker of a TraceGraph; it trusts no index that `merge` keeps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from coexec.errors import InternalError
from coexec.graph.tracegraph import END, EXTERNAL_VALUE, START, Node, Producer, SeenPath, TraceGraph
from coexec.records import EXTERNAL


def check_graph(graph: TraceGraph) -> None:
    """Raises InternalError with the first problem of `find_problems`."""
    for problem in find_problems(graph):
        raise InternalError(f"Malformed TraceGraph: {problem}.")


def find_problems(graph: TraceGraph) -> Iterator[str]:
    """Yields every broken invariant as text.

    Invariants:
    1. node ids are dense, START is 0 and has no parents, END is 1 and has no children;
    2. `children`, `parents` and `edge_visits` tell the same edges, none twice, each travelled at least once;
    3. forward edges are acyclic and go to a higher rank; a back edge goes to a folded node from which its source can be
       reached over forward edges;
    4. every node lies behind START, and `by_key` lists exactly the nodes of a key, oldest first;
    5. every input position allows at least one producer, and each is EXTERNAL or an existing output of a node that
       comes earlier, or reaches this one over another pass of a loop;
    6. `fed`, `foreign` and `ambiguous` name existing positions, `foreign` only where EXTERNAL is allowed, and
       `ambiguous` only where there are alternatives, or several passes of a folded producer;
    7. visits are conserved: a node was entered over edges as often as it was passed, and left no more often;
    8. every remembered path is a walk from START, and to END if complete, whose data comes from earlier on it.
    """
    yield from _id_problems(graph)
    yield from _edge_problems(graph)
    yield from _cycle_problems(graph)
    yield from _key_problems(graph)
    for node in graph.nodes[2:]:
        yield from (f"node {node.id} ({node.op}) {problem}" for problem in _node_problems(graph, node))
    yield from _visit_problems(graph)
    for path in graph.paths.values():
        yield from _path_problems(graph, path)


def _id_problems(graph: TraceGraph) -> Iterator[str]:
    for index, node in enumerate(graph.nodes):
        if node.id != index:
            yield f"node {node.id} stands at index {index}"
    if graph.nodes[START].parents:
        yield f"START has parents {graph.nodes[START].parents}"
    if graph.nodes[END].children:
        yield f"END has children {graph.nodes[END].children}"


def _edge_problems(graph: TraceGraph) -> Iterator[str]:
    down = [(node.id, child) for node in graph.nodes for child in node.children]
    up = [(parent, node.id) for node in graph.nodes for parent in node.parents]
    if len(set(down)) != len(down) or len(set(up)) != len(up):
        yield "an edge is listed twice"
    for edge in sorted(set(down) ^ set(up)):
        yield f"edge {edge} is known to one end only"
    for edge in sorted(set(down) ^ set(graph.edge_visits)):
        yield f"edge {edge} is in `children` or in `edge_visits`, not in both"
    for edge, visits in graph.edge_visits.items():
        if visits < 1:
            yield f"edge {edge} was never taken"
    for edge in sorted(graph.back_edges - set(down)):
        yield f"back edge {edge} is no edge"


def _cycle_problems(graph: TraceGraph) -> Iterator[str]:
    forward = [
        [child for child in node.children if (at, child) not in graph.back_edges] for at, node in enumerate(graph.nodes)
    ]
    for at, children in enumerate(forward):
        for child in children:
            if graph.nodes[child].rank <= graph.nodes[at].rank:
                yield f"edge {(at, child)} does not go to a higher rank"
    missing = Counter(child for children in forward for child in children)
    ready = [at for at in range(len(graph.nodes)) if not missing[at]]
    for at in ready:  # grows while it is walked: Kahn's topological order
        for child in forward[at]:
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
    if len(ready) != len(graph.nodes):
        yield f"nodes {sorted(set(range(len(graph.nodes))) - set(ready))} are on or behind a cycle"
    for source, target in sorted(graph.back_edges):
        if not graph.nodes[target].folded or source not in _reached(forward, target):
            yield f"back edge {(source, target)} begins no pass of a folded loop"


def _reached(forward: list[list[int]], start: int) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for child in forward[todo.pop()]:
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def _key_problems(graph: TraceGraph) -> Iterator[str]:
    by_key: dict[object, list[int]] = {}
    for node in graph.nodes[2:]:
        by_key.setdefault(node.key, []).append(node.id)
        if not node.parents:
            yield f"node {node.id} ({node.op}) is not behind START"
    if by_key != graph.by_key:
        yield "`by_key` does not list the nodes of every key"


def _node_problems(graph: TraceGraph, node: Node) -> Iterator[str]:
    for position, allowed in enumerate(node.inputs):
        if not allowed:
            yield f"allows no producer at input {position}"
        for producer in sorted(allowed):
            if producer != EXTERNAL_VALUE and not _is_earlier_output(graph, node, producer):
                yield f"allows {producer} at input {position}, which is no output of an earlier node"
    for position in node.fed:
        if not 0 <= position < len(node.numbers):
            yield f"is fed number {position} of {len(node.numbers)}"
    for position in node.foreign:
        if not 0 <= position < len(node.inputs) or EXTERNAL_VALUE not in node.inputs[position]:
            yield f"has foreign memory at input {position}, which is never external"
    for position in node.ambiguous:
        allowed = node.inputs[position] if 0 <= position < len(node.inputs) else set()
        if len(allowed) < 2 and not any(graph.nodes[source].folded for source, _ in allowed - {EXTERNAL_VALUE}):
            yield f"is ambiguous at input {position}, which has no alternatives"


def _is_earlier_output(graph: TraceGraph, node: Node, producer: Producer) -> bool:
    source, output = producer
    if source == EXTERNAL or not END < source < len(graph.nodes):
        return False
    if not 0 <= output < graph.nodes[source].n_outputs:
        return False
    if graph.nodes[source].rank < node.rank:
        return True
    return node.id in _reached([at.children for at in graph.nodes], source)


def _visit_problems(graph: TraceGraph) -> Iterator[str]:
    for node in graph.nodes:
        entering = sum(graph.edge_visits.get((parent, node.id), 0) for parent in node.parents)
        leaving = sum(graph.edge_visits.get((node.id, child), 0) for child in node.children)
        if node.id != START and entering != node.visits:
            yield f"node {node.id} was visited {node.visits} times, entered {entering} times"
        if leaving > node.visits:
            yield f"node {node.id} was visited {node.visits} times, left {leaving} times"


def _path_problems(graph: TraceGraph, path: SeenPath) -> Iterator[str]:
    walk = (START, *path.nodes, *((END,) if path.complete else ()))
    for edge in itertools.pairwise(walk):
        if edge not in graph.edge_visits:
            yield f"a remembered path takes {edge}, which is no edge"
    passed: set[int] = {EXTERNAL}
    for at in path.nodes:
        for position, allowed in enumerate(graph.nodes[at].inputs):
            if not any(source in passed for source, _ in allowed):
                yield f"on a remembered path nobody produces input {position} of node {at}"
        passed.add(at)
