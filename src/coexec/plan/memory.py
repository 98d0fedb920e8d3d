"""Which memory belongs to the outside, and which nodes need a word from Python that a running graph cannot compute."""

from __future__ import annotations

from coexec.graph.tracegraph import Node, Producer, TraceGraph
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
    are followed to the root of the storage. One pass in topological order: an optimizer's chain of in-place ops on one
    parameter is as long as the step, too long for recursion.
    """
    outside: dict[Producer, bool] = {}
    writes: dict[int, tuple[int, ...]] = {}
    for node in sorted(graph.nodes[2:], key=lambda node: node.rank):
        positions = [any(_is_outside(outside, value) for value in allowed) for allowed in node.inputs]
        for output in range(node.n_outputs):
            root = node.aliases[output] if node.aliases else -1
            outside[node.id, output] = positions[root] if root >= 0 else node.kind in _PYTHON_OWNS
        if node.kind not in _PYTHON_OWNS and any(positions[position] for position in node.writes):
            writes[node.id] = tuple(position for position in node.writes if positions[position])
    return writes


def _is_outside(outside: dict[Producer, bool], value: Producer) -> bool:
    return value[0] == EXTERNAL or outside[value]


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
