"""Printers of a TraceGraph: text for people, Graphviz for pictures."""

from __future__ import annotations

from collections.abc import Callable

from coexec.graph.tracegraph import END, EXTERNAL_VALUE, START, Edge, Node, Producer, TraceGraph
from coexec.records import OpKind

Locate = Callable[[int], str]
"""Turns a 64-bit program location into "file.py:12", for people."""

_COLOURS = {OpKind.FETCH: "lightblue", OpKind.SYNC: "salmon", OpKind.BARRIER: "salmon", OpKind.HOST: "lightgrey"}


def render_graph(graph: TraceGraph, locate: Locate | None = None) -> str:
    """Returns one line per node in topological order.

    `%3.1` is output 1 of node 3, `ext` an external value, `a|b` alternatives by path, `!` a written input, `~` a number
    that is fed; the nodes that may follow come after `->`, with `^` where they begin another pass of a loop.
    """
    head = f"TraceGraph of {graph.traces} traces: {len(graph.nodes) - 2} nodes, {len(graph.edge_visits)} edges"
    lines = [_line(graph, node, locate) for node in _in_order(graph)]
    return "\n".join([head, *lines])


def to_dot(graph: TraceGraph, locate: Locate | None = None) -> str:
    """Returns the graph in Graphviz's language; edges carry how often traces took them; back edges are dashed."""
    lines = ["digraph TraceGraph {", "  node [shape=box, fontname=monospace];"]
    for node in _in_order(graph):
        label = _quoted(_name(node) + (f"\\n{locate(node.location)}" if locate and node.id > END else ""))
        colour = _COLOURS.get(node.kind) if node.id > END else None
        lines.append(f"  n{node.id} [label={label}{f', style=filled, fillcolor={colour}' if colour else ''}];")
    lines += [f"  {_edge(graph, edge, visits)}" for edge, visits in sorted(graph.edge_visits.items())]
    return "\n".join([*lines, "}"])


def _in_order(graph: TraceGraph) -> list[Node]:
    return sorted(graph.nodes, key=lambda node: (node.rank, node.id))


def _line(graph: TraceGraph, node: Node, locate: Locate | None) -> str:
    following = " ".join(_next(graph, node.id, child) for child in node.children)
    text = f"  {_name(node)}{_notes(node)}"
    if following:
        text += f"  -> {following}"
    return text + (f"  # {locate(node.location)}" if locate and node.id > END else "")


def _next(graph: TraceGraph, at: int, child: int) -> str:
    return f"{_short(child)}{'^' if (at, child) in graph.back_edges else ''}({graph.edge_visits[at, child]})"


def _edge(graph: TraceGraph, edge: Edge, visits: int) -> str:
    back = ", style=dashed, constraint=false" if edge in graph.back_edges else ""
    return f'n{edge[0]} -> n{edge[1]} [label="{visits}"{back}];'


def _short(node_id: int) -> str:
    return {START: "START", END: "END"}.get(node_id, f"%{node_id}")


def _name(node: Node) -> str:
    if node.id <= END:
        return _short(node.id)
    inputs = [_values(allowed) + ("!" if k in node.writes else "") for k, allowed in enumerate(node.inputs)]
    numbers = [("~" if k in node.fed else "") + repr(number) for k, number in enumerate(node.numbers)]
    return f"%{node.id} = {node.op}({', '.join(inputs + numbers)})"


def _values(allowed: set[Producer]) -> str:
    return "|".join(_value(producer) for producer in sorted(allowed))


def _value(producer: Producer) -> str:
    if producer == EXTERNAL_VALUE:
        return "ext"
    return f"%{producer[0]}" if producer[1] == 0 else f"%{producer[0]}.{producer[1]}"


def _notes(node: Node) -> str:
    words = [node.kind.name.lower()] if node.id > END and node.kind != OpKind.COMPUTE else []
    words += ["random"] if node.random else []
    words += ["folded"] if node.folded else []
    words += [f"foreign={sorted(node.foreign)}"] if node.foreign else []
    words += [f"ambiguous={sorted(node.ambiguous)}"] if node.ambiguous else []
    return "".join(f"  {word}" for word in words)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
