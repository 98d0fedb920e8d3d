"""Strongly connected components: the loops of a graph are those with an edge inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coexec.graph.tracegraph import TraceGraph


def strongly_connected(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the components of a graph, each before all that lead to it (Tarjan 1972).

    Args:
        successors: per vertex; vertices are 0 to len - 1.
    """
    return _Search(successors).run()


def loop_components(graph: TraceGraph) -> list[list[int]]:
    """Returns the node ids of each outermost loop of `graph`."""
    found = strongly_connected([node.children for node in graph.nodes])
    return [nodes for nodes in found if len(nodes) > 1 or (nodes[0], nodes[0]) in graph.back_edges]


class _Search:
    """Depth first, without recursion: a training step is a chain of thousands."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self.successors = successors
        self.number = [-1] * len(successors)  # order of discovery
        self.low = [0] * len(successors)  # the earliest vertex on the stack that is known to be reached
        self.on_stack = [False] * len(successors)
        self.stack: list[int] = []
        self.found: list[list[int]] = []
        self.discovered = 0

    def run(self) -> list[list[int]]:
        for root in range(len(self.successors)):
            if self.number[root] < 0:
                self._from(root)
        return self.found

    def _from(self, root: int) -> None:
        path: list[tuple[int, Iterator[int]]] = [self._discover(root)]
        while path:
            at, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                self._leave(at)
                if path:
                    above = path[-1][0]
                    self.low[above] = min(self.low[above], self.low[at])
            elif self.number[following] < 0:
                path.append(self._discover(following))
            elif self.on_stack[following]:
                self.low[at] = min(self.low[at], self.number[following])

    def _discover(self, at: int) -> tuple[int, Iterator[int]]:
        self.number[at] = self.low[at] = self.discovered
        self.discovered += 1
        self.stack.append(at)
        self.on_stack[at] = True
        return at, iter(self.successors[at])

    def _leave(self, at: int) -> None:
        if self.low[at] != self.number[at]:
            return
        component: list[int] = []
        while not component or component[-1] != at:
            component.append(self.stack.pop())
            self.on_stack[component[-1]] = False
        self.found.append(component)
