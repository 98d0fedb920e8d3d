"""Turns a few lines of eager PyTorch into a SegmentSpec plus the inputs and results of that very run.

Test-only: the product records in C++. Ops are seen below autograd, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from coexec.backends.ops import MEMORY_FORMATS, SCALAR_TYPES, resolve, tensor_results, written_values
from coexec.backends.spec import (
    Arg,
    Const,
    FedNumber,
    FedWrapped,
    ListArg,
    Mode,
    NumberInput,
    Op,
    Publish,
    SegmentSpec,
    Storage,
    TensorArg,
    TensorInput,
    TensorListArg,
    Undefined,
    Value,
    WrappedNumber,
    check_spec,
)

ENUMS: dict[Any, int] = {
    **{dtype: number for number, dtype in SCALAR_TYPES.items()},
    **{memory_format: number for number, memory_format in enumerate(MEMORY_FORMATS)},
    torch.strided: 0,
}
NUMBER_NAMES = {float: "float64", int: "int64", bool: "bool", complex: "complex128"}


@dataclass
class Recording:
    """A segment, what it was run with, and what that run left behind."""

    spec: SegmentSpec
    inputs: list[torch.Tensor]  # copies from before the run; call fresh_inputs() to use them
    outputs: list[torch.Tensor]
    mutated: list[torch.Tensor]
    published: list[torch.Tensor]
    rng_before: torch.Tensor
    rng_after: torch.Tensor

    def fresh_inputs(self) -> list[torch.Tensor]:
        """Inputs over new memory, shared as it was."""
        copies: dict[int, torch.Tensor] = {}
        for t in self.inputs:
            key = t.untyped_storage()._cdata
            if key not in copies:
                copies[key] = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage().clone())
        return [
            torch.empty(0, dtype=t.dtype).set_(
                copies[t.untyped_storage()._cdata].untyped_storage(), t.storage_offset(), t.shape, t.stride()
            )
            for t in self.inputs
        ]


@dataclass
class Recorder(TorchDispatchMode):
    """Records every op while it is active. `publish(tensor)` marks a fetch."""

    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    input_copies: list[torch.Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    published: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.keep: list[torch.Tensor] = []  # addresses must not be used twice while we record
        self.storage_of: dict[int, int] = {}
        self.value_of: dict[Any, Value] = {}
        self.originals: dict[int, torch.Tensor] = {}  # external storage -> copy of its bytes at first sight
        self.input_tensors: list[torch.Tensor] = []
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler" or func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)  # no part of a segment: the numbers that are read come back as fed ones
        name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
        recorded = self.arguments(func._schema, args, kwargs)
        result = func(*args, **kwargs)
        outs = tuple(None if t is None else self.value(t) for t in tensor_results(func, result))
        self.ops.append(Op(name, recorded, outs))
        self.random |= resolve(name).random
        return result

    def arguments(self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Arg, ...]:
        given = [
            args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(schema.arguments)
        ]
        return tuple(self.argument(a, value) for a, value in zip(schema.arguments, given, strict=True))

    def argument(self, schema: Any, value: Any) -> Arg:
        if isinstance(value, torch.Tensor):
            return TensorArg(self.value(value, external=True).id)
        if value is None:
            return Undefined()
        kind = str(schema.real_type)
        if kind in ("Tensor", "Optional[Tensor]"):
            return WrappedNumber(value, NUMBER_NAMES[type(value)])
        if isinstance(value, (list, tuple)) and "Tensor" in kind:
            ids = tuple(None if v is None else self.value(v, external=True).id for v in value)
            return TensorListArg(ids, optional="Optional" in kind)
        if isinstance(value, (list, tuple)):
            return Const(tuple(value))
        if isinstance(value, torch.device):
            return Const(str(value), "device")
        if "Device" in kind:
            return Const(str(torch.device(value)), "device")
        return Const(ENUMS.get(value, value) if not isinstance(value, (bool, int, float, complex, str)) else value)

    def value(self, tensor: torch.Tensor, external: bool = False) -> Value:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        if key in self.value_of:
            return self.value_of[key]
        self.keep.append(tensor.detach())
        index = self.storage_of.setdefault(storage._cdata, len(self.storages))
        if index == len(self.storages):
            self.storages.append(Storage(storage.nbytes(), external))
            self.originals[index] = torch.empty(0, dtype=torch.uint8).set_(storage.clone())
        elif external:
            assert self.storages[index].external, f"a view of internal memory reached an op unseen: {key}"
        dtype = str(tensor.dtype)[6:]
        made = Value(len(self.values), index, dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.values.append(made)
        self.value_of[key] = made
        if external:
            self.add_input(made, tensor)
        return made

    def add_input(self, value: Value, tensor: torch.Tensor) -> None:
        self.inputs.append(value)
        self.input_tensors.append(tensor.detach())

    def publish(self, tensor: torch.Tensor) -> None:
        """Mark that the content of `tensor` leaves the segment here."""
        with _disable_current_modes():
            value = self.value(tensor, external=tensor.untyped_storage()._cdata not in self.storage_of)
            self.publishes.append(Publish(len(self.ops) - 1, value.id, len(self.publishes)))
            self.published.append(tensor.detach().clone())


def record(
    run: Callable[[Recorder], Sequence[torch.Tensor]], mode: Mode = "functional", threads: int = 1, seed: int = 0
) -> Recording:
    """Run `run` eagerly and record it. It returns the tensors that leave the segment.

    External memory is changed as by any eager run; the recording's inputs are copies from before.
    """
    torch.manual_seed(seed)
    rng_before = torch.get_rng_state()
    recorder = Recorder()
    with recorder:
        results = [t.detach() for t in run(recorder)]
    rng_after = torch.get_rng_state()
    outputs = tuple(recorder.value(t).id for t in results)
    written = {recorder.values[v].storage for op in recorder.ops for v in written_values(op)}
    spec = SegmentSpec(
        storages=tuple(recorder.storages),
        inputs=tuple(TensorInput(v) for v in recorder.inputs),
        ops=tuple(recorder.ops),
        outputs=outputs,
        mutated=tuple(i for i, v in enumerate(recorder.inputs) if v.storage in written),
        mode=mode,
        publishes=tuple(recorder.publishes),
        random=recorder.random,
        threads=threads,
    )
    check_spec(spec)
    inputs = [_restore(recorder, v) for v in recorder.inputs]
    mutated = [recorder.input_tensors[i].clone() for i in spec.mutated]
    return Recording(spec, inputs, [t.clone() for t in results], mutated, recorder.published, rng_before, rng_after)


def _restore(recorder: Recorder, value: Value) -> torch.Tensor:
    memory = recorder.originals[value.storage].untyped_storage()
    return torch.empty(0, dtype=getattr(torch, value.dtype)).set_(memory, value.offset, value.sizes, value.strides)


def feed_differences(first: Recording, second: Recording) -> Recording:
    """`first`, with every number that differs in `second` (another iteration of the same program) as a fed input."""
    fed: list[bool | int | float | complex] = []
    base = len(first.spec.inputs)
    ops = tuple(
        replace(a, args=tuple(_fed_arg(x, y, fed, base) for x, y in zip(a.args, b.args, strict=True)))
        for a, b in zip(first.spec.ops, second.spec.ops, strict=True)
    )
    numbers = tuple(NumberInput(NUMBER_NAMES[type(n)]) for n in fed)
    spec = replace(first.spec, ops=ops, inputs=(*first.spec.inputs, *numbers))
    check_spec(spec)
    dtypes = [getattr(torch, n.dtype) for n in numbers]
    scalars = [torch.tensor(n, dtype=dtype) for n, dtype in zip(fed, dtypes, strict=True)]
    return replace(first, spec=spec, inputs=[*first.inputs, *scalars])


def _fed_arg(a: Arg, b: Arg, fed: list[Any], base: int) -> Arg:
    if a == b and type(getattr(a, "value", None)) is type(getattr(b, "value", None)):
        return a
    if isinstance(a, WrappedNumber):
        fed.append(a.value)
        return FedWrapped(base + len(fed) - 1, a.dtype)
    assert isinstance(a, Const)
    assert isinstance(b, Const)
    if isinstance(a.value, tuple):
        assert isinstance(b.value, tuple)
        return ListArg(tuple(_fed_item(x, y, fed, base) for x, y in zip(a.value, b.value, strict=True)))
    return _fed_item(a.value, b.value, fed, base)


def _fed_item(a: Any, b: Any, fed: list[Any], base: int) -> Const | FedNumber:
    if a == b:
        return Const(a)
    fed.append(a)
    return FedNumber(base + len(fed) - 1)
