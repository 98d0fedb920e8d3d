"""Every sample of PyTorch's own operator database (`op_db`) as a small step: forward, backward, in place, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map

from tests.coexec.harness import Program, seed_all

Sample = tuple[str, Callable[[], Program]]

op_db = common_methods_invocations.op_db
# The database sets and restores the seed around each random op, which would make Python wait around it; here the
# stream goes on from op to op, and its state is compared after every call.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


def names() -> list[str]:
    """The entries of the database; an operator has one for each of its variants."""
    return [_name(op) for op in op_db]


def samples(name: str, first: int | None) -> Iterator[Sample]:
    """Yields (name, make) for the samples of an entry; `first` limits them per dtype and variant."""
    op = next(op for op in op_db if _name(op) == name)
    for dtype in _dtypes(op):
        for variant, build in (("", _out_of_place), ("in place", _in_place), ("error", _error)):
            found = _inputs(op, dtype, variant)
            for k, sample in enumerate(itertools.islice(found, first)):
                yield f"{name} {str(dtype)[6:]} {variant or 'forward'} #{k}", build(op, sample, k)


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _dtypes(op: Any) -> list[torch.dtype]:
    """float32, and one dtype of another kind."""
    supported = op.supported_dtypes("cpu")
    others = [d for d in (torch.complex64, torch.int64, torch.bool) if d in supported]
    chosen = [d for d in (torch.float32, *others[:1]) if d in supported]
    return chosen or sorted(supported, key=str)[:1]


def _inputs(op: Any, dtype: torch.dtype, variant: str) -> Iterator[Any]:
    """Yields SampleInputs, from the same random numbers in each run."""
    seed_all(0)
    if variant == "in place" and op.inplace_variant is None:
        return
    if variant == "error":
        if dtype is _dtypes(op)[0] and op.error_inputs_func is not None:
            yield from (error.sample_input for error in op.error_inputs_func(op, "cpu"))
        return
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    if variant == "in place":
        grad = grad and op.supports_inplace_autograd
    # Not op.sample_inputs(): it inspects the stack for the name of a test at each sample, which takes longer than it.
    yield from op.sample_inputs_func(op, "cpu", dtype, grad)


def _out_of_place(op: Any, sample: Any, k: int) -> Callable[[], Program]:
    return _program(op, sample, with_arguments=k % 2 == 1)


def _in_place(op: Any, sample: Any, k: int) -> Callable[[], Program]:
    return _program(op.inplace_variant, sample, with_arguments=True)


def _error(op: Any, sample: Any, k: int) -> Callable[[], Program]:
    return _program(op, sample, with_arguments=False)


def _program(function: Any, sample: Any, with_arguments: bool) -> Callable[[], Program]:
    """A step that calls `function` on values in flight, and differentiates what can be.

    Args:
        with_arguments: they are returned too, so that which tensors share memory is compared.
    """
    leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]

    def step() -> Any:
        args, kwargs = in_flight(((sample.input, *sample.args), sample.kwargs))
        result = function(*args, **kwargs)
        return result, gradients(result, leaves), (args, kwargs) if with_arguments else None

    return lambda: Program(step, watch=lambda: leaves)


def in_flight(tree: Any) -> Any:
    """Copies every tensor in a step: what an operator gets is a value that the graph is still computing."""
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, tree)


def gradients(result: Any, leaves: list[torch.Tensor]) -> Any:
    """The gradients of every differentiable output by every leaf, weighted so that no two elements are alike."""
    wanted = [t for t in leaves if t.requires_grad]
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [t for t in outputs if t.layout == torch.strided and not t.is_nested]
    if not wanted or not outputs:
        return None
    return torch.autograd.grad(outputs, wanted, [_weights(t) for t in outputs], allow_unused=True)


def _weights(t: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)
