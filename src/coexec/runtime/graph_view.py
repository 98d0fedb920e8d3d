"""`step.trace_graph`: a TraceGraph that prints itself."""

from __future__ import annotations

from coexec.graph.render import render_graph, to_dot
from coexec.graph.tracegraph import TraceGraph


class GraphView:
    """A TraceGraph, printable, with `.to_dot()`."""

    def __init__(self, graph: TraceGraph) -> None:
        self.graph = graph

    def __str__(self) -> str:
        return render_graph(self.graph)

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.graph.nodes)

    def to_dot(self) -> str:
        """Returns the graph in Graphviz's language."""
        return to_dot(self.graph)
