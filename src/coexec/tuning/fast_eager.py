"""Eager as a user has it: the same kernels, called through torch's own functions instead of op overloads.

A functional graph calls `torch.ops.aten.addmm.default`, which takes Python about 10 us; `torch.addmm`, which is what an
nn.Linear comes down to, takes 2 us. On small graphs that is most of the time: a candidate that beats only the former
would be slower than leaving it off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from coexec.backends.candidates.program import Program
from coexec.tuning.oracle import draws

PLACES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
"""Where torch keeps the functions of its ops: parsed arguments, no boxing."""


def fast_eager(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`module.forward` with every call replaced that does the same on `inputs`, bit for bit; the module is left alone.

    An op that draws random numbers stays as it is. The generator is left alone.
    """
    fast = GraphModule(module, copy.deepcopy(module.graph))
    values: dict[Node, Any] = {}
    given = iter(inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in fast.graph.nodes:
            values[node] = _step(fast, node, values, given)
    fast.recompile()
    forward: Callable[..., Any] = fast.forward
    return forward


def fast_program(program: Program) -> Callable[..., tuple[Any, ...]]:
    """A runner of a program, as a candidate's; gradients are off in the process that calls it."""
    forward = fast_eager(program.module, program.inputs)
    return lambda *inputs: tuple(forward(*inputs))


def _step(module: GraphModule, node: Node, values: dict[Node, Any], given: Any) -> Any:
    """The node's value; its target is replaced on the way where possible."""
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "output":
        return None
    assert callable(node.target)
    value = node.target(*args, **kwargs)
    if isinstance(node.target, torch._ops.OpOverload) and not draws(node) and not node.target._schema.is_mutable:
        for function in _functions_of(node.target):
            if _does_the_same(function, args, kwargs, value):
                node.target = function
                break
    return value


def _functions_of(op: torch._ops.OpOverload) -> list[Callable[..., Any]]:
    name = op._schema.name.removeprefix("aten::")
    return [found for place in PLACES if (found := getattr(place, name, None)) is not None and "::" not in name]


def _does_the_same(function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> bool:
    try:
        return _same(function(*args, **kwargs), value)
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        return False


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        if not isinstance(mine, torch.Tensor) or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        same_memory = mine.data_ptr() == theirs.data_ptr()  # a view stays one
        is_view = theirs._is_view()
        return mine.stride() == theirs.stride() and (same_memory or not is_view) and _same_bits(mine, theirs)
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(_same(m, t) for m, t in zip(mine, theirs, strict=True))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)
