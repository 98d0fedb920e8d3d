"""The reference interpreter: runs a segment op by op as recorded, bit-equal to `replay`, and in float64.

The float64 run is what results are measured against: random draws and integers are taken from the float32 run, so both
follow the same path (README promise on numerics). Everything runs below autograd, as it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coexec.backends.ops import Fed, Overload, call, decode, draws, resolve, torch_dtype
from coexec.backends.spec import Op, Publish, SegmentSpec, SpecError, Value, used_values
from coexec.errors import CoexecError

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.float64: torch.float64, torch.complex32: torch.complex128, torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}  # fmt: skip
"""The dtype that stands for each floating-point dtype in the float64 run."""


Mapping = Callable[[torch.Tensor], torch.Tensor]


class NoWideRunError(CoexecError):
    """This segment cannot be run in float64; the message says why."""


@dataclass(slots=True)
class Results:
    """What one run of a segment gave."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    mutated: list[torch.Tensor] = field(default_factory=list)  # new content of each of spec.mutated
    published: list[torch.Tensor] = field(default_factory=list)  # copies, in the order of spec.publishes


def run_reference(
    spec: SegmentSpec,
    inputs: Sequence[torch.Tensor],
    *,
    in_place: bool | None = None,
    noise: torch.Generator | None = None,
) -> Results:
    """Run `spec` on `inputs` exactly as recorded.

    Args:
        spec: the segment.
        inputs: one tensor per entry of `spec.inputs`; fed numbers are 0-dim tensors.
        in_place: write external memory in place; by default as `spec.mode` says.
        noise: change every floating-point result by a unit in its last place, up or down: another rounding, as
            another kernel for the same op would have it.

    Raises:
        SpecError: an op's result does not have the recorded dtype, sizes or strides.
    """
    in_place = spec.mode == "commit" if in_place is None else in_place
    run = Run(spec, inputs if in_place else copy_memory(spec, inputs), noise=noise)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        run.publish(-1)
        for index, op in enumerate(spec.ops):
            run.step(op)
            run.publish(index)
    return run.results()


def run_reference_pair(spec: SegmentSpec, inputs: Sequence[torch.Tensor]) -> tuple[Results, Results]:
    """Run `spec` as recorded and, in lockstep, in float64; `inputs` are left alone.

    Raises:
        NoWideRunError: a float64 run means nothing here (memory reinterpreted as another dtype, an op without float64).
    """
    narrow, wide = Run(spec, copy_memory(spec, inputs)), Run(spec, widen_memory(spec, inputs), wide=True)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for run in (narrow, wide):
            run.publish(-1)
        for index, op in enumerate(spec.ops):
            narrow.step(op)
            wide.step_wide(op, narrow)
            for run in (narrow, wide):
                run.publish(index)
    return narrow.results(), wide.results()


class Run:
    """One pass over the ops: the tensors that stand for values now."""

    def __init__(
        self,
        spec: SegmentSpec,
        inputs: Sequence[torch.Tensor],
        wide: bool = False,
        noise: torch.Generator | None = None,
    ) -> None:
        if len(inputs) != len(spec.inputs):
            raise SpecError(f"segment takes {len(spec.inputs)} inputs, got {len(inputs)}")
        self.spec, self.inputs, self.wide, self.noise = spec, inputs, wide, noise
        self.storages_seen = {v.storage for v in spec.input_values()}
        self.recorded = spec.values()
        self.tensors: dict[int, torch.Tensor] = {}
        self.published: list[torch.Tensor] = []
        self.publishes: dict[int, list[Publish]] = {}
        for publish in spec.publishes:
            self.publishes.setdefault(publish.after_op, []).append(publish)
        for position, entry in enumerate(spec.inputs):
            if (value := getattr(entry, "value", None)) is not None:
                self.bind(value, inputs[position], f"input {position}")

    def step(self, op: Op) -> None:
        """Run one op as recorded."""
        overload, named = self.prepare(op)
        for out, tensor in zip(op.outs, self.call(op, overload, named), strict=True):
            if out is not None:
                assert tensor is not None
                self.disturb(out, tensor, rounds=not draws(op) and any(used_values(arg) for arg in op.args))
                self.bind(out, tensor, op.op)

    def disturb(self, out: Value, tensor: torch.Tensor, rounds: bool) -> None:
        """Add the noise to a result in memory of its own. `rounds`: it is computed from others; ones are just one."""
        fresh = out.storage not in self.storages_seen
        self.storages_seen.add(out.storage)
        if self.noise is None or not rounds or not fresh or tensor.dtype not in WIDE or not _is_dense(tensor):
            return
        signs = torch.randint(0, 2, tensor.shape, generator=self.noise, dtype=torch.int8) * 2 - 1
        tensor.mul_(1 + signs.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)

    def step_wide(self, op: Op, narrow: Run) -> None:
        """Run one op in float64, after `narrow` ran it: draws and integers are copied from there."""
        overload, named = self.prepare(op)
        if draws(op):
            return self.copy_draws(op, named, narrow)
        results = self.call(op, overload, {name: _widen_dtype(value) for name, value in named.items()})
        for out, tensor in zip(op.outs, results, strict=True):
            if out is not None:
                assert tensor is not None
                self.bind(out, self.follow(out, tensor, narrow), op.op)

    def follow(self, out: Value, tensor: torch.Tensor, narrow: Run) -> torch.Tensor:
        """A result of the float64 run: integers become those of the float32 run, floats become float64."""
        if tuple(tensor.shape) != out.sizes:
            raise NoWideRunError(f"value {out.id} is its memory read as another dtype")
        if tensor.dtype not in WIDE:
            return tensor.copy_(narrow.tensors[out.id]) if _is_dense(tensor) else tensor
        return tensor if tensor.dtype == WIDE[tensor.dtype] else tensor.to(WIDE[tensor.dtype])

    def copy_draws(self, op: Op, named: dict[str, Any], narrow: Run) -> None:
        """Results of a random op are those of the float32 run, in our memory where they lie in ours."""
        scaled = _dropout_from_mask(op, named, narrow)
        for position, out in enumerate(op.outs):
            if out is None:
                continue
            drawn = narrow.tensors[out.id] if scaled is None or position else scaled
            if out.id in self.tensors:
                self.tensors[out.id].copy_(drawn)
            else:
                self.bind(out, _widen(drawn), op.op)

    def prepare(self, op: Op) -> tuple[Overload, dict[str, Any]]:
        """The overload and its decoded arguments, fed numbers filled in."""
        named = decode(op, self.tensors.__getitem__, lambda value: self.recorded[value].offset)
        return resolve(op.op), {name: self.fill(value) for name, value in named.items()}

    def fill(self, value: Any) -> Any:
        """Replace fed numbers by their value now."""
        if isinstance(value, list):
            return [self.fill(v) for v in value]
        return self.inputs[value.input].item() if isinstance(value, Fed) else value

    def call(self, op: Op, overload: Overload, named: dict[str, Any]) -> list[torch.Tensor | None]:
        """Run the op. NoWideRunError if it fails in the float64 run only."""
        try:
            return call(overload, named)
        except RuntimeError as error:
            if self.wide:
                raise NoWideRunError(f"{op.op} has no float64 run: {error}") from error
            raise

    def bind(self, value: Value, tensor: torch.Tensor, origin: str) -> None:
        """Let `tensor` stand for `value`. SpecError if it does not look as recorded."""
        dtype = torch_dtype(value.dtype)
        if self.wide:
            dtype = WIDE.get(dtype, dtype)
        if tensor.dtype != dtype or tuple(tensor.shape) != value.sizes:
            raise SpecError(
                f"{origin}: value {value.id} is recorded as {value.dtype}{list(value.sizes)}, "
                f"the run gave {str(tensor.dtype)[6:]}{list(tensor.shape)}: record the segment again"
            )
        self.tensors[value.id] = tensor

    def publish(self, after_op: int) -> None:
        """Copy what leaves after this op."""
        self.published += [self.tensors[p.value].clone() for p in self.publishes.get(after_op, ())]

    def results(self) -> Results:
        """What the run leaves behind."""
        outputs = [self.tensors[v] for v in self.spec.outputs]
        return Results(outputs, [self.inputs[i] for i in self.spec.mutated], self.published)


def copy_memory(spec: SegmentSpec, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs over copies of their memory; those that share memory still do."""
    return map_memory(spec, inputs, lambda flat: flat.clone())


def widen_memory(spec: SegmentSpec, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs over float64 copies of their memory. NoWideRunError if two dtypes share memory."""
    return map_memory(spec, inputs, lambda flat: _widen(flat.clone()))


def map_memory(spec: SegmentSpec, inputs: Sequence[torch.Tensor], mapping: Mapping) -> list[torch.Tensor]:
    """The inputs over new memory, which `mapping` makes of the old; those that share memory still do.

    Raises:
        NoWideRunError: two dtypes share memory, so there is no one tensor to map.
    """
    groups: dict[int, list[int]] = {}
    for position, entry in enumerate(spec.inputs):
        if (value := getattr(entry, "value", None)) is not None:
            groups.setdefault(value.storage, []).append(position)
    mapped = list(inputs)
    for positions in groups.values():
        for position, tensor in zip(positions, _map_group([inputs[p] for p in positions], mapping), strict=True):
            mapped[position] = tensor
    return mapped


def _map_group(tensors: list[torch.Tensor], mapping: Mapping) -> list[torch.Tensor]:
    """Tensors of one storage over a mapped copy of the part of it that they touch."""
    if len({t.dtype for t in tensors}) > 1:
        raise NoWideRunError("two dtypes share memory")
    low = min(t.storage_offset() for t in tensors)
    high = max(t.storage_offset() + _span(t) for t in tensors)
    flat = torch.empty(0, dtype=tensors[0].dtype).set_(tensors[0].untyped_storage(), low, (high - low,), (1,))
    memory = mapping(flat)
    return [memory.as_strided(t.shape, t.stride(), t.storage_offset() - low) for t in tensors]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype), copy=True)


def _widen_dtype(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _is_dense(tensor: torch.Tensor) -> bool:
    """No element lies at two places, so that it can be written (an expanded tensor cannot)."""
    return all(n == 1 or s != 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _dropout_from_mask(op: Op, named: dict[str, Any], narrow: Run) -> torch.Tensor | None:
    """native_dropout draws only its mask; the result follows from it in float64. None for other ops."""
    if op.op != "aten::native_dropout" or not named["train"]:
        return None
    mask = op.outs[1]
    assert mask is not None
    keep = 1.0 - float(named["p"])
    scaled: torch.Tensor = named["input"] * narrow.tensors[mask.id] * (1.0 / keep if keep else 0.0)
    return scaled
