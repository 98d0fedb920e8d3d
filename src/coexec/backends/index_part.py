"""The part of a graph of `torch.compile` that computes its indices from inputs, on its own, to be run before a call.

Of integers and booleans alone: their arithmetic is exact, so compiled code that does the same comes to the same
indices, while a rounded float may fall on either side of a limit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from coexec.backends.candidates.program import made_from
from coexec.backends.index_sources import INTEGERS, MOST_ELEMENTS, WIDE

NOT_ALONE = frozenset(
    f"aten::{name}"
    for name in ("as_strided", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)  # fmt: skip
"""Ops whose results may be other numbers in compiled code: of memory beside a tensor, or never written."""


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Computes all such indices of one graph; what they share is computed once."""

    inputs: tuple[int, ...]  # positions of those it takes, among the graph's
    forward: Callable[..., tuple[torch.Tensor, ...]]

    def __call__(self, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The indices, of the graph's inputs. Errors: eager's, where what computes an index has one out of range."""
        return self.forward(*[inputs[position] for position in self.inputs])


class PartBuilder:
    """Collects indices of `module`, of which the nodes have `meta["val"]`, and builds the part that computes them."""

    def __init__(self, module: GraphModule, tensors: dict[Node, torch.Tensor]) -> None:
        self._module, self._tensors = module, tensors
        self._indices: dict[Node, int] = {}  # those that are asked for, and which of the results they are

    def add(self, index: Node) -> int | None:
        """Which result of the part this index is; None if it cannot be computed so."""
        if index not in self._runnable:
            return None
        return self._indices.setdefault(index, len(self._indices))

    def build(self) -> IndexPart | None:
        """The part, as code; None if no index was added."""
        if not self._indices:
            return None
        graph, copies, positions = Graph(), dict[Node, Node](), list[int]()
        wanted = made_from(self._indices)
        placeholders = self._module.graph.find_nodes(op="placeholder")
        for node in self._module.graph.nodes:
            if node in wanted:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                positions += [placeholders.index(node)] if node.op == "placeholder" else []
        graph.output(tuple(copies[index] for index in self._indices))
        part = GraphModule(self._module, graph)
        _LazyGraphModule.force_recompile(part)
        return IndexPart(tuple(positions), part.forward)

    @functools.cached_property
    def _runnable(self) -> set[Node]:
        """The nodes that can be run ahead, with all that they are made from."""
        found = set[Node]()
        for node in self._module.graph.nodes:
            if found.issuperset(node.all_input_nodes) and self._may_run(node):
                found.add(node)
        return found

    def _may_run(self, node: Node) -> bool:
        """Whether it alone is exact, changes nothing, draws nothing and is small."""
        if node.op == "output":
            return False
        if node.op in ("placeholder", "get_attr"):
            tensor = self._tensors.get(node)
            return _is_size(node.meta.get("val")) if tensor is None else tensor.dtype in (*INTEGERS, torch.bool)
        value = node.meta.get("val")
        values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        if not values or not all(self._is_exact(v, node) or _is_size(v) for v in values):
            return False
        if not isinstance(node.target, OpOverload):
            return node.target is operator.getitem or (_is_size(value) and _is_operator(node.target))
        drawn = torch.Tag.nondeterministic_seeded in node.target.tags
        kept = node.target.namespace == "aten" and not node.target._schema.is_mutable
        return kept and not drawn and node.target._schema.name not in NOT_ALONE

    def _is_exact(self, value: Any, node: Node) -> bool:
        """Whether a result of the node has as many bits as what it is made from, so that no backend cuts it its way."""
        if not isinstance(value, torch.Tensor) or not _is_small(value.numel()):
            return False
        given = {self._tensors[v].dtype for v in node.all_input_nodes if v in self._tensors}
        cut = value.dtype == torch.int32 and torch.int64 in given
        return value.dtype in (*WIDE, torch.bool) and not cut


def _is_size(value: Any) -> bool:
    """Whether it is a number that is known once the inputs' shapes are: one that depends on data has no hint."""
    return type(value) is int or (isinstance(value, torch.SymInt) and value.node.has_hint())


def _is_small(elements: Any) -> bool:
    """Of a symbol: as traced. At larger sizes the look costs more, in proportion."""
    return _is_size(elements) and int(elements if type(elements) is int else elements.node.hint) <= MOST_ELEMENTS


def _is_operator(target: Any) -> bool:
    """One of Python's own, which graphs use on sizes."""
    return getattr(target, "__module__", None) == operator.add.__module__


__all__ = ["IndexPart", "PartBuilder"]
