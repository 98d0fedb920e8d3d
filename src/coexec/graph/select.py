"""The data side of Case Select: which of several allowed producers an input has on a given path.

Of a node that a loop passed several times it is the latest pass; a backward pass that reads older ones is ambiguous.

The GraphRunner, ahead of Python, takes the allowed producer that the path passed last (EXTERNAL counts as passed before
everything). That is what `if c: x = f(x)` before `g(x)` means. It is not always the answer: `g(old if c else x)` picks
in plain Python, on one path. Such an input is marked `ambiguous`, and the GraphRunner waits there for Python's word.
"""

from __future__ import annotations

from collections.abc import Mapping

from coexec.graph.tracegraph import Node, Producer, TraceGraph
from coexec.records import EXTERNAL


def passed_last(allowed: set[Producer], passed: Mapping[int, int]) -> Producer | None:
    """Returns the allowed producer that was passed last; None if there is none, or two outputs of one node compete.

    Args:
        passed: index on the path per node id, of several the last; a whole path without loops will do, since
            producers come before readers on it.
    """
    best, best_index, tie = None, -2, False
    for producer in allowed:
        index = -1 if producer[0] == EXTERNAL else passed.get(producer[0], -2)
        if index > best_index:
            best, best_index, tie = producer, index, False
        elif index == best_index > -2:
            tie = True
    return None if tie else best


def _before(node: Node, allowed: set[Producer], path: dict[int, int]) -> dict[int, int]:
    """The part of an indexed path that matters to `node`. In a loop, a producer may come after its reader."""
    here = path[node.id]
    return {source: path[source] for source, _ in allowed if path.get(source, here) < here}


class RememberedPaths:
    """The paths of earlier traces, indexed when a merge first asks; a merge that adds no alternative pays nothing.

    Paths that passed a node twice are left out: there, a producer may come again after its reader.
    """

    def __init__(self, graph: TraceGraph) -> None:
        self._graph = graph
        self._indexed: list[dict[int, int]] | None = None

    def contradict(self, node: Node, position: int, added: Producer) -> bool:
        """True if the rule would choose `added`, seen only now, on an earlier path, which had another producer."""
        allowed = node.inputs[position]
        return any(
            node.id in path and added[0] in path and passed_last(allowed, _before(node, allowed, path)) in (added, None)
            for path in self._paths()
        )

    def _paths(self) -> list[dict[int, int]]:
        if self._indexed is None:
            indexed = [({at: k for k, at in enumerate(path.nodes)}, path) for path in self._graph.paths.values()]
            self._indexed = [index for index, path in indexed if len(index) == len(path.nodes)]
        return self._indexed
