"""Random ops in a compiled graph: the same numbers as eager, in the same places.

A CPU kernel fills a dense tensor in the order of its memory. A compiler may lay the tensor out differently, which
would give every element another draw. So each draw is made into flat memory, which has one layout, and then viewed in
eager's.
Inductor keeps the order of draws (`fallback_random`). It would remove one whose numbers nobody uses, although the next
draw depends on it: such a draw is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from coexec.backends.fed import NotLowerableError
from coexec.backends.ops import Overload, torch_dtype
from coexec.backends.spec import Op, Value

Named = dict[str, Any]

aten = torch.ops.aten


def call_draw(op: Op, overload: Overload, named: Named) -> list[torch.Tensor | None]:
    """Run a random op. NotLowerableError if a compiled graph would draw other numbers than eager."""
    rule = RULES.get(overload.base)
    if rule is None:
        raise NotLowerableError(op.op, "no rule how to draw the same numbers as eager in a compiled graph")
    if named.get("generator") is not None:
        raise NotLowerableError(op.op, "it draws from a generator of its own")
    results = rule(op, named)
    if any(p.written for p in overload.parameters):
        return [named["self"].copy_(results[0])]
    return list(results)


def return_unused_draws(graph: GraphModule) -> None:
    """Appends draws without users to the results of a lowered graph, so that the generator advances as in eager."""
    graph.graph.eliminate_dead_code()  # leaves random ops alone
    unused = [n for n in graph.graph.nodes if _is_draw(n) and not n.users]
    if unused:
        output = graph.graph.output_node()
        output.args = ([*output.args[0], *unused],)  # type: ignore[misc]
        graph.recompile()


def _is_draw(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _result(op: Op, position: int = 0) -> Value:
    value = op.outs[position]
    if value is None:
        raise NotLowerableError(op.op, "its result is undefined")
    return value


def _in_memory_order(op: Op, value: Value, draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Draw `value`'s elements flat and view them as it lies in memory. NotLowerableError if it has gaps."""
    count, order = 1, sorted(range(len(value.sizes)), key=lambda d: (value.strides[d], value.sizes[d]))
    for dimension in order:
        if value.sizes[dimension] != 1 and value.strides[dimension] != count:
            raise NotLowerableError(op.op, f"it fills a tensor with gaps: sizes {value.sizes}, strides {value.strides}")
        count *= value.sizes[dimension]
    outer_first = order[::-1]
    flat = draw(count).view([value.sizes[d] for d in outer_first])
    return flat.permute([outer_first.index(d) for d in range(len(outer_first))])


def _bernoulli(op: Op, named: Named) -> tuple[torch.Tensor]:
    value, p = _result(op), named.get("p")
    if not isinstance(p, float):
        raise NotLowerableError(op.op, "its probability is a tensor")
    return (_in_memory_order(op, value, lambda n: _flat_bernoulli(n, value.dtype, p)),)


def _flat_bernoulli(count: int, dtype: str, p: float) -> torch.Tensor:
    drawn: torch.Tensor = aten.bernoulli.p(torch.empty([count], dtype=torch_dtype(dtype)), p)
    return drawn


def _native_dropout(op: Op, named: Named) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = named["input"], float(named["p"])
    if named["train"] is False or p == 0 or p == 1:
        raise NotLowerableError(op.op, f"dropout with p={p}, train={named['train']} draws nothing")
    mask_value = _result(op, 1)
    mask = _in_memory_order(op, mask_value, lambda n: _flat_bernoulli(n, "bool", 1.0 - p))
    return x * mask * (1.0 / (1.0 - p)), mask


def _uniform(op: Op, named: Named) -> tuple[torch.Tensor]:
    value, low, high = _result(op), named["from"], named["to"]
    unit = _in_memory_order(op, value, lambda n: torch.rand([n], dtype=torch_dtype(value.dtype)))
    return (unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low,)


def _normal(op: Op, named: Named) -> tuple[torch.Tensor]:
    mean, std = named["mean"], named["std"]
    if isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor):
        raise NotLowerableError(op.op, "its mean or standard deviation is a tensor")
    unit = _flat_normal(op)
    return (unit if (mean, std) == (0.0, 1.0) else unit * std + mean,)


def _flat_normal(op: Op) -> torch.Tensor:
    value = _result(op)
    if not _is_contiguous(value):
        # Eager uses another algorithm (one pair of draws at a time) when the result is not contiguous.
        raise NotLowerableError(op.op, f"it fills a tensor that is not contiguous: strides {value.strides}")
    return torch.randn(value.sizes, dtype=torch_dtype(value.dtype))


def _is_contiguous(value: Value) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.sizes), reversed(value.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _rand(op: Op, named: Named) -> tuple[torch.Tensor]:
    value = _result(op)
    return (_in_memory_order(op, value, lambda n: torch.rand([n], dtype=torch_dtype(value.dtype))),)


def _randn(op: Op, named: Named) -> tuple[torch.Tensor]:
    return (_flat_normal(op),)


def _randint(op: Op, named: Named) -> tuple[torch.Tensor]:
    value, low, high = _result(op), named.get("low", named.get("from", 0)), named.get("high", named.get("to"))
    if high is None:
        raise NotLowerableError(op.op, "it draws from the dtype's whole range")
    dtype = torch_dtype(value.dtype)
    return (_in_memory_order(op, value, lambda n: aten.randint.low(low or 0, high, [n], dtype=dtype)),)


def _randperm(op: Op, named: Named) -> tuple[torch.Tensor]:
    # Drawn as int32, which takes the same draws: Inductor replaces an int64 randperm that is used as an index.
    drawn = torch.randperm(named["n"], dtype=torch.int32)
    return (drawn.to(torch_dtype(_result(op).dtype)),)


def _multinomial(op: Op, named: Named) -> tuple[torch.Tensor]:
    return (torch.multinomial(named["self"], named["num_samples"], named["replacement"]),)


RULES: dict[str, Callable[[Op, Named], tuple[torch.Tensor, ...]]] = {
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "native_dropout": _native_dropout,
    "uniform_": _uniform,
    "normal_": _normal,
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "randint": _randint,
    "randint_like": _randint,
    "random_": _randint,
    "randperm": _randperm,
    "multinomial": _multinomial,
}
"""Random ops that can be compiled, by base name."""
