"""From a segment to one functional FX graph: no in-place ops, no views of written memory, Inductor's decompositions.

The graph takes `spec.inputs` in order and returns `spec.outputs` (in mode ``functional`` followed by the new content of
`spec.mutated`; in mode ``commit`` the graph ends in `copy_` into those inputs), and then checks and draws that nobody
uses.
A publish is a call of `coexec_lower::mark` where its value is computed; :mod:`coexec.backends.publish` turns it into
the real op once the graph is optimized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from coexec.backends.aliasing import Plan, check_writes, plan_inputs
from coexec.backends.divisions import call_division, divides_toward_zero
from coexec.backends.draws import call_draw, return_unused_draws
from coexec.backends.fed import NotLowerableError, call_fed, has_fed
from coexec.backends.ops import Overload, call, decode, draws, flatten_results, resolve, torch_dtype, written_values
from coexec.backends.publish import mark
from coexec.backends.results import copy_results_from_written_inputs
from coexec.backends.spec import (
    NumberInput,
    Op,
    Publish,
    SegmentSpec,
    TensorInput,
    TensorListArg,
    Value,
    check_spec,
    used_values,
)
from coexec.backends.symbolic import SymbolicSpec
from coexec.backends.value_checks import note_unless_right

aten = torch.ops.aten

REFUSED = {
    "resize_": "changes the size of its storage",
    "set_": "replaces its storage",
    "_local_scalar_dense": "its result is needed by Python",
    "nonzero": "its size depends on data",
    "masked_select": "its size depends on data",
}
"""Ops that no compiled segment may hold, by base name."""


def _foreach_norm(named: dict[str, Any]) -> list[torch.Tensor | None]:
    return [aten.linalg_vector_norm(t, named["ord"], dtype=named["dtype"]) for t in named["self"]]


def _native_batch_norm(named: dict[str, Any]) -> list[torch.Tensor | None]:
    """The schema hides that running statistics are written: functionalization would leave the write in the graph."""
    if not named["training"] or named["running_mean"] is None:
        return flatten_results(aten.native_batch_norm(*named.values()))
    out, mean, rstd, *running = aten._native_batch_norm_legit_functional(*named.values())
    named["running_mean"].copy_(running[0])
    named["running_var"].copy_(running[1])
    return [out, mean, rstd]


def _convolution_backward(named: dict[str, Any]) -> list[torch.Tensor | None]:
    """The bias gradient as a sum of its own: oneDNN's sum over channels-last memory, which the compiler prefers, adds
    up one by one and is ten times less accurate than eager's."""
    wanted = named["output_mask"]
    grads = aten.convolution_backward(*{**named, "output_mask": [wanted[0], wanted[1], False]}.values())
    grad = named["grad_output"]
    return [grads[0], grads[1], grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None]


def _native_batch_norm_backward(named: dict[str, Any]) -> list[torch.Tensor | None]:
    """With sums in float64, as eager's kernel has them: an error of a sum is the same for every element of a channel,
    and adds up in the gradient of whatever is broadcast over the channel, such as a bias before the normalization.
    Only the sum over samples is in float64: twice as fast as all of it, and as accurate."""
    x, grad = named["input"], named["grad_out"]
    if not named["train"] or x.dtype != torch.float32:
        return flatten_results(aten.native_batch_norm_backward(*named.values()))
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.shape[1]
    centered, inverse = x - named["save_mean"].view(shape), named["save_invstd"]
    total, dot = _sum_of_samples(grad), _sum_of_samples(grad * centered)
    slope = (dot * inverse * inverse / count).to(x.dtype).view(shape)
    scale = inverse if named["weight"] is None else inverse * named["weight"]
    grad_input = (grad - (total / count).to(x.dtype).view(shape) - centered * slope) * scale.view(shape)
    results = [grad_input, (dot * inverse).to(x.dtype), total.to(x.dtype)]
    return [t if wanted else None for t, wanted in zip(results, named["output_mask"], strict=True)]


def _sum_of_samples(x: torch.Tensor) -> torch.Tensor:
    """Per channel; an empty list of dimensions would mean all of them."""
    per_sample = x.sum(list(range(2, x.dim()))) if x.dim() > 2 else x
    return per_sample.sum(0, dtype=torch.float64)


def _scaled_add(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.add.Tensor(self, aten.mul.Tensor(other, alpha))


def _scaled_sub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.sub.Tensor(self, aten.mul.Tensor(other, alpha))


SCALED = {aten.add.Tensor: _scaled_add, aten.sub.Tensor: _scaled_sub}
"""Decompositions of ours: Inductor's fusion of `add` behind a matrix product forgets alpha (seen: torch 2.13)."""

SPELLED_OUT = {
    "aten::native_batch_norm_backward": _native_batch_norm_backward,
    "aten::convolution_backward": _convolution_backward,
    "aten::_foreach_norm.Scalar": _foreach_norm,  # Inductor has only the kernel that eager runs
    "aten::native_batch_norm": _native_batch_norm,
}
"""Ops that are lowered by a rule of ours instead of as they are."""

NONE_BELOW_ZERO = frozenset({"index_add", "index_add_", "index_copy", "index_copy_", "index_select"})
"""Ops that eager rejects an index below zero for, and whose decomposition counts it from the end."""

NEEDED_BY_PYTHON = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of ops whose result Python waits for."""


def lower(spec: SegmentSpec, decompositions: dict[Any, Any], symbolic: Symbolic | None = None) -> GraphModule:
    """The segment as a functional graph over fake tensors (each node's `meta["val"]`).

    Args:
        spec: the segment; checked first.
        decompositions: Inductor's table, see :func:`coexec.backends.inductor.compile_segment`.
        symbolic: the same segment for many sizes, of which `spec` has the hints.

    Raises:
        SpecError: the segment breaks an invariant.
        NotLowerableError: an op cannot be in a compiled segment.
    """
    check_spec(spec)
    check_writes(spec)
    _refuse(spec)
    plan = plan_inputs(spec)
    mode, traced = (FakeTensorMode(), spec) if symbolic is None else (symbolic.mode, symbolic.outside())
    with mode:
        inputs = [_fake_input(entry) for entry in traced.inputs]
    decompositions = {**decompositions, **SCALED}
    lowering = _Lowering(spec, plan) if symbolic is None else _SymbolicLowering(symbolic, plan)
    tracing_mode: Literal["fake", "symbolic"] = "fake" if symbolic is None else "symbolic"
    with torch.no_grad(), mode:
        graph = make_fx(lowering.run, decomposition_table=decompositions, tracing_mode=tracing_mode)(*inputs)
    assert isinstance(graph, GraphModule)
    return_unused_draws(graph)
    copy_results_from_written_inputs(graph)
    return graph


def _too_large_if_below_zero(written: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The index, out of range at the other end if it was below zero."""
    return torch.where(index < 0, torch.full_like(index, written.shape[dim] if written.dim() else 1), index)


class Symbolic:
    """A segment for many sizes on its way through the compiler: its symbols as the compiler has them."""

    def __init__(self, spec: SymbolicSpec) -> None:
        self.spec = spec
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)
        self.sizes: list[torch.SymInt] = []
        self.numbers: dict[Any, int] = {}  # the compiler's symbols by our number
        for number, hint in enumerate(spec.hints):
            source = ConstantSource(f"__coexec_size_{number}")
            symbol = self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            size = self.env.create_symintnode(symbol, hint=hint, source=source)
            assert isinstance(size, torch.SymInt)
            self.sizes.append(size)
            self.numbers[symbol] = number

    def outside(self) -> SegmentSpec:
        """The segment with the compiler's symbols, for making its inputs."""
        return self.spec.at(self.sizes)

    def inside(self, inputs: Sequence[torch.Tensor]) -> SegmentSpec:
        """The segment with sizes read from its traced inputs."""
        return self.spec.at([inputs[source.input].shape[source.dimension] for source in self.spec.symbols])


def _refuse(spec: SegmentSpec) -> None:
    for op in spec.ops:
        overload = resolve(op.op)
        if overload.base in REFUSED:
            raise NotLowerableError(op.op, REFUSED[overload.base])
        if overload.base == "index":
            _refuse_masks(op, spec.values())
        elif not NEEDED_BY_PYTHON.isdisjoint(overload.target.tags):
            raise NotLowerableError(op.op, "its result's size or value is needed by Python")


def _refuse_masks(op: Op, values: dict[int, Value]) -> None:
    """An index by position has a static size; an index by mask has not."""
    if any(values[v].dtype in ("bool", "uint8") for v in used_values(op.args[1])):
        raise NotLowerableError(op.op, "its result's size depends on how many elements of a mask are set")


def _fake_input(entry: TensorInput | NumberInput) -> torch.Tensor:
    """A tensor as the artifact will see it: at the start of its own memory."""
    if isinstance(entry, NumberInput):
        return torch.empty((), dtype=torch_dtype(entry.dtype))
    return torch.empty_strided(entry.value.sizes, entry.value.strides, dtype=torch_dtype(entry.value.dtype))


class _Lowering:
    """One pass over the ops on functional tensors. `run` is what make_fx traces."""

    def __init__(self, spec: SegmentSpec, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.recorded = spec.values()
        self.tensors: dict[int, torch.Tensor] = {}
        self.checks: list[torch.Tensor] = []  # returned, so that nobody leaves them out
        self.storages_seen = {v.storage for v in spec.input_values()}
        self.publishes: dict[int, list[Publish]] = {}
        for publish in spec.publishes:
            self.publishes.setdefault(publish.after_op, []).append(publish)

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Interpret the segment; return outputs, then (mode functional) new contents."""
        torch._enable_functionalization(reapply_views=True)
        try:
            self.functional = [torch._to_functional_tensor(t) for t in inputs]
            self.bind_inputs()
            self.interpret()
            outputs = [_plain(self.tensors[v]) for v in self.spec.outputs]
            contents = [_plain(self.tensors[self.spec.input_value(p).id]) for p in self.spec.mutated]
            bases = {p: _plain(self.functional[p]) for p in self.plan.written_bases}
            checks = [_plain(check) for check in self.checks]
        finally:
            torch._disable_functionalization()
        return self.finish(inputs, outputs, contents, bases) + checks

    def bind_inputs(self) -> None:
        """Give every input its tensor; members of a written group become views of the group's base."""
        for position, entry in enumerate(self.spec.inputs):
            if isinstance(entry, TensorInput):
                self.tensors[entry.value.id] = self.view_of_base(position, entry.value)

    def view_of_base(self, position: int, value: Value) -> torch.Tensor:
        base = self.plan.base_of.get(position, position)
        if base == position:
            return self.functional[position]
        offset = value.offset - self.spec.input_value(base).offset
        return self.functional[base].as_strided(value.sizes, value.strides, offset)

    def interpret(self) -> None:
        """Run the ops, marking publishes on the way."""
        self.publish(-1)
        for index, op in enumerate(self.spec.ops):
            try:
                results = self.call(op)
            except NotLowerableError:
                raise
            except Exception as error:
                raise NotLowerableError(op.op, f"tracing it failed: {type(error).__name__}: {error}") from error
            for out, tensor in zip(op.outs, results, strict=True):
                if out is not None:
                    self.bind(op, out, tensor)
            self.publish(index)

    def call(self, op: Op) -> list[torch.Tensor | None]:
        """Run one op on functional tensors."""
        overload = resolve(op.op)
        named = decode(op, self.tensors.__getitem__, lambda value: self.recorded[value].offset)
        if has_fed(named):
            return flatten_results(call_fed(op.op, overload, named, self.functional.__getitem__))
        if draws(op):
            return call_draw(op, overload, named)
        if overload.base in NONE_BELOW_ZERO:
            named["index"] = _too_large_if_below_zero(named["self"], named["dim"], named["index"])
        if (check := note_unless_right(overload, named)) is not None:
            self.checks.append(check)
        if divides_toward_zero(overload, named):
            return [call_division(overload, named)]
        if op.op in SPELLED_OUT:
            return SPELLED_OUT[op.op](named)
        if overload.base.startswith("_foreach_") and self.writes_one_for_another(op):
            return _one_by_one(overload, named)
        return call(overload, named)

    def writes_one_for_another(self, op: Op) -> bool:
        """Whether an element of a foreach op is written before a later one reads it: the op out of place reads all
        elements first."""
        written: set[int] = set()
        lists = [arg.values for arg in op.args if isinstance(arg, TensorListArg)]
        for target, *others in zip(*lists, strict=False) if written_values(op) else ():
            element = [self.recorded[v].storage for v in (target, *others) if v is not None]
            if not written.isdisjoint(element):
                return True
            written.add(element[0])
        return False

    def bind(self, op: Op, out: Value, tensor: torch.Tensor | None) -> None:
        """Let `tensor` stand for `out`, laid out as eager laid it out."""
        dtype = torch_dtype(out.dtype)
        if tensor is None or tuple(tensor.shape) != out.sizes or tensor.dtype != dtype:
            got = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
            raise NotLowerableError(op.op, f"recorded {out.dtype}{list(out.sizes)}, tracing gave {got}")
        is_fresh = out.storage not in self.storages_seen
        self.storages_seen.add(out.storage)
        if is_fresh and not same_strides(out.sizes, tensor.stride(), out.strides):
            # The kernel's layout is not the meta kernel's: later views count on the kernel's.
            tensor = torch.empty_strided(out.sizes, out.strides, dtype=dtype).copy_(tensor)
        self.tensors[out.id] = tensor

    def publish(self, after_op: int) -> None:
        for publish in self.publishes.get(after_op, ()):
            mark(_plain(self.tensors[publish.value]), publish.channel)

    def finish(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        contents: list[torch.Tensor],
        bases: dict[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Write or return the new contents, and keep results apart from inputs and from each other."""
        results = [_laid_out(t, self.recorded[v]) for t, v in zip(outputs, self.spec.outputs, strict=True)]
        if self.spec.mode == "functional":
            return results + [t.clone(memory_format=torch.preserve_format) for t in contents]
        for position, content in bases.items():
            if content is not inputs[position]:  # another input of a written storage, itself not written
                inputs[position].copy_(content)
        return results


class _SymbolicLowering(_Lowering):
    """The same pass with sizes that are read from the inputs."""

    def __init__(self, symbolic: Symbolic, plan: Plan) -> None:
        super().__init__(symbolic.spec.observed[0], plan)
        self.symbolic = symbolic

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Interpret the segment at the sizes that `inputs` have."""
        self.spec = self.symbolic.inside(inputs)
        self.recorded = self.spec.values()
        return super().run(*inputs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a functional one holds now."""
    torch._functionalize_sync(tensor)
    return torch._from_functional_tensor(tensor)


def _laid_out(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A copy of its own, in the geometry that the caller expects; the compiler removes a copy that changes nothing."""
    if tensor.stride() == value.strides:
        return tensor.clone(memory_format=torch.preserve_format)
    return torch.empty_strided(value.sizes, value.strides, dtype=tensor.dtype).copy_(tensor)


def _one_by_one(overload: Overload, named: dict[str, Any]) -> list[torch.Tensor | None]:
    """An in-place foreach op as eager runs it: element by element."""
    for position in range(len(named["self"])):
        call(overload, {k: v[position : position + 1] if isinstance(v, list) else v for k, v in named.items()})
    return []  # it returns nothing


def same_strides(sizes: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Both address the same elements: strides of dimensions of one element do not count."""
    return all(n <= 1 or x == y for n, x, y in zip(sizes, a, b, strict=True))
