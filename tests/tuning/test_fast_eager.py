"""Eager without the cost of op overloads is still eager, bit for bit."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule

from coexec.tuning.fast_eager import fast_eager

aten = torch.ops.aten


def layers() -> tuple[GraphModule, list[torch.Tensor]]:
    graph = Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    turned = graph.call_function(aten.t.default, (weight,))
    hidden = graph.call_function(aten.addmm.default, (bias, x, turned))
    active = graph.call_function(aten.gelu.default, (hidden,), {"approximate": "tanh"})
    flat = graph.call_function(aten.view.default, (active, [-1]))
    normal = graph.call_function(aten.native_layer_norm.default, (active, [8], None, None, 1e-5))
    first = graph.call_function(operator.getitem, (normal, 0))
    total = graph.call_function(aten.sum.dim_IntList, (first, [1], True))
    graph.output((flat, first, total, None))
    return GraphModule(torch.nn.Module(), graph), [torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)]


def test_it_gives_the_same_bits_and_calls_torchs_functions() -> None:
    module, inputs = layers()
    fast = fast_eager(module, inputs)
    for mine, theirs in zip(fast(*inputs), module(*inputs), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    targets = [node.target for node in fast.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    assert not [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    assert next(n.target for n in module.graph.nodes if n.op == "call_function") is aten.t.default  # left alone


def test_an_op_that_draws_is_not_replaced_and_the_generator_is_left_alone() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.bernoulli.p, (x, 0.5)),))
    before = torch.get_rng_state()
    fast = fast_eager(GraphModule(torch.nn.Module(), graph), [torch.zeros(8)])
    targets = [node.target for node in fast.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
    assert targets == [aten.bernoulli.p]
    assert torch.equal(torch.get_rng_state(), before)
