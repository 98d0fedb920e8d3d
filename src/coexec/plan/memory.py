"""Which memory belongs to the outside, and which nodes need a word from Python that a running graph cannot compute."""

from __future__ import annotations

from coexec.graph.tracegraph import EXTERNAL_VALUE, Node, Producer, TraceGraph
from coexec.records import EXTERNAL, OpKind

PYTHON_RUNS = frozenset({OpKind.SYNC, OpKind.BARRIER})
"""Python does these itself after it waited for all earlier ops; they are in no compiled segment."""

_PYTHON_OWNS = PYTHON_RUNS | {OpKind.HOST}
"""Fresh outputs of these are ordinary tensors that Python already holds: writing to them is seen outside."""

_LIFTS = frozenset({"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"})
"""Bring a tensor that Python has just made, `torch.tensor(x)`, into the step: it exists when Python gets there."""


def external_writes(graph: TraceGraph) -> dict[int, tuple[int, ...]]:
    """Returns per node that the graph executes the input positions through which it writes the outside's memory.

    Memory is the outside's if on some path it came from there, or if Python holds it as an ordinary tensor. Aliases
    are followed to the root of the storage. One pass in topological order, and more where loops carry memory of the
    outside on: an optimizer's chain of in-place ops on one parameter is as long as the step, too long for recursion.
    """
    in_order = sorted(graph.nodes[2:], key=lambda node: node.rank)
    outside: set[Producer] = {EXTERNAL_VALUE}
    while not _add_outside(in_order, outside) and graph.back_edges:
        pass
    writes: dict[int, tuple[int, ...]] = {}
    for node in in_order:
        if node.writes and node.kind not in _PYTHON_OWNS:
            written = tuple(position for position in node.writes if not outside.isdisjoint(node.inputs[position]))
            if written:
                writes[node.id] = written
    return writes


def _add_outside(in_order: list[Node], outside: set[Producer]) -> bool:
    """Adds the outputs that share memory with `outside`, or are Python's; False if there were new ones."""
    before = len(outside)
    for node in in_order:
        for output in range(node.n_outputs):
            root = node.aliases[output] if node.aliases else -1
            shared = not outside.isdisjoint(node.inputs[root]) if root >= 0 else node.kind in _PYTHON_OWNS
            if shared:
                outside.add((node.id, output))
    return len(outside) == before


def needs_python(graph: TraceGraph, node: Node) -> bool:
    """True if a graph cannot run `node` before Python reached it, whatever the graph has computed.

    Its numbers vary, its input is memory that others write or a value that Python made or chose in plain Python.
    HOST, SYNC and BARRIER nodes are not run by a graph: False.
    """
    if node.kind in _PYTHON_OWNS:
        return False
    if node.fed or node.foreign or node.ambiguous or node.op in _LIFTS:
        return True
    return any(
        source != EXTERNAL and graph.nodes[source].kind == OpKind.HOST
        for allowed in node.inputs
        for source, _ in allowed
    )
