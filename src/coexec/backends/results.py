"""Keeps the results of a lowered segment apart from the inputs that it writes.

The compiler takes a copy away where the original is neither an input nor a result. New contents of an input are
neither, until they are computed right into the input's memory: a result that was a copy of them (`cache.clone()` after
the cache was written) would then be that memory itself. Such a result is copied from the input instead, after the
write: that copy stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def copy_results_from_written_inputs(module: GraphModule) -> None:
    """Replaces results that show new contents of inputs by copies of these inputs, made after the writes."""
    graph = module.graph
    writes = {node.args[1]: node for node in graph.nodes if _writes_an_input(node)}
    if not writes:
        return
    output = graph.output_node()
    given: Any = output.args[0]
    results = list(given)
    for k, result in enumerate(results):
        chain = _chain_to(result, writes)
        if chain:
            results[k] = _repeat(graph, chain, writes[chain[0].args[0]])
    output.args = (results,)
    graph.eliminate_dead_code()  # leaves writes alone
    module.recompile()


def _writes_an_input(node: Node) -> bool:
    return node.target is aten.copy_.default and isinstance(node.args[0], Node) and node.args[0].op == "placeholder"


def _chain_to(result: Any, contents: dict[Any, Node]) -> list[Node]:
    """The copies and views that lead from one of `contents` to a result, in order; [] if there is no such way."""
    chain: list[Node] = []
    node = result
    while isinstance(node, Node) and node not in contents:
        if not (node.target is aten.clone.default or getattr(node.target, "is_view", False)):
            return []
        chain.insert(0, node)
        node = node.args[0]
    return chain if isinstance(node, Node) else []


def _repeat(graph: Graph, chain: list[Node], source: Node) -> Node:
    """The same chain on another tensor, before the graph's end."""
    for node in chain:
        assert callable(node.target)
        with graph.inserting_before(graph.output_node()):
            copied = graph.call_function(node.target, (source, *node.args[1:]), node.kwargs)
        copied.meta = {**node.meta, "val": _value(copied)}
        source = copied
    return source


def _value(node: Node) -> FakeTensor:
    """The fake tensor that an op gives, in the memory that it is in."""
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    assert callable(node.target)
    with args[0].fake_mode, torch.no_grad():
        value = node.target(*args, **kwargs)
    assert isinstance(value, FakeTensor)
    return value
