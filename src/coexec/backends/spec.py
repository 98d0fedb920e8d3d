"""What the runtime asks a backend to compile: one straight-line segment of a step, as frozen data. Imports no torch.

A segment is a list of ops as the interceptor saw them (below autograd), with everything that a backend may need: the
memory that the values live in (``storages``), where values come from (``inputs``), what has to come out (``outputs``,
``mutated``, ``publishes``) and how (``mode``, ``random``, ``threads``).

:mod:`coexec.backends.spec_json` holds the JSON form, which is the contract with the native side, and the canonical text
that cache keys are made from. :func:`check_spec` lists the invariants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from coexec.errors import InternalError

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes per element of every dtype that a segment may hold, by torch's name without the prefix."""

NUMBER_DTYPES = ("float64", "int64", "bool", "complex128")
"""How a fed Python number arrives: a 0-dim CPU tensor of this dtype."""

Mode = Literal["commit", "functional"]
"""``commit``: external memory is written in place by the artifact. ``functional``: it is left alone, and the new
content of every mutated input follows the ordinary outputs."""

Scalar = bool | int | float | complex | str | None


class SpecError(InternalError):
    """A segment that breaks an invariant: a bug of whoever built it, never the user's mistake."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory."""

    nbytes: int
    external: bool  # existed before the segment and came in through an input


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: where it lies and what it looks like. Strides and offset count elements, as torch does."""

    id: int
    storage: int  # index in SegmentSpec.storages
    dtype: str  # torch's name without "torch."
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def geometry(self) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int]:
        """Everything but the id: two ids with one geometry are the same tensor."""
        return self.storage, self.dtype, self.sizes, self.strides, self.offset

    def extent(self) -> tuple[int, int]:
        """Half-open range of bytes within the storage that elements of this value touch."""
        if 0 in self.sizes:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.offset * ITEM_BYTES[self.dtype], (last + 1) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that the caller passes. Inputs may share a storage."""

    value: Value


@dataclass(frozen=True, slots=True)
class NumberInput:
    """A Python number that changes between iterations, passed as a 0-dim CPU tensor of `dtype`."""

    dtype: str


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A Tensor argument: a value defined before this op."""

    value: int


@dataclass(frozen=True, slots=True)
class TensorListArg:
    """A Tensor[] or Tensor?[] argument; None is an undefined tensor and makes the argument a Tensor?[]."""

    values: tuple[int | None, ...]
    optional: bool = False  # declared Tensor?[]


@dataclass(frozen=True, slots=True)
class Const:
    """A constant as the boxed IValue has it: enums are ints. `kind` tells a device from a string."""

    value: Scalar | tuple[Scalar, ...]
    kind: Literal["plain", "device"] = "plain"


@dataclass(frozen=True, slots=True)
class FedNumber:
    """A Scalar, float or int argument that is number input `input`."""

    input: int


@dataclass(frozen=True, slots=True)
class ListArg:
    """A Scalar[], float[] or int[] argument of which some elements are fed."""

    items: tuple[Const | FedNumber, ...]


@dataclass(frozen=True, slots=True)
class WrappedNumber:
    """A Tensor argument made from a constant Python number: 0-dim, and weak in type promotion."""

    value: bool | int | float | complex
    dtype: str


@dataclass(frozen=True, slots=True)
class FedWrapped:
    """A Tensor argument made from a Python number that is number input `input`: 0-dim, and weak in type promotion."""

    input: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Undefined:
    """None, or an undefined tensor."""


Arg = TensorArg | TensorListArg | Const | FedNumber | ListArg | WrappedNumber | FedWrapped | Undefined


@dataclass(frozen=True, slots=True)
class Op:
    """One op, exactly as it was dispatched."""

    op: str  # name with overload, e.g. "aten::add.Tensor"; the default overload has no dot
    args: tuple[Arg, ...]  # every argument of the schema in its order, keyword-only ones included
    outs: tuple[Value | None, ...]  # tensor results in order, lists flattened; None where the op returned undefined


@dataclass(frozen=True, slots=True)
class Publish:
    """A value's content leaves the segment while it runs: after op `after_op` (-1: before the first), as it is then."""

    after_op: int
    value: int
    channel: int  # the caller's number for this message; part of the compiled code


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """One segment. The artifact is called with `inputs` in order and returns `outputs`, then in mode ``functional`` the
    new content of each of `mutated`, in that input's sizes and any layout: the caller copies it. What it returns beyond
    that are checks and draws that nobody uses, and is ignored."""

    storages: tuple[Storage, ...]
    inputs: tuple[TensorInput | NumberInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...] = ()  # values, each covering its storage: its content at the segment's end is returned
    mutated: tuple[int, ...] = ()  # positions in `inputs` that together cover the external memory which is written
    mode: Mode = "functional"
    publishes: tuple[Publish, ...] = ()  # in the order in which they happen
    random: bool = False  # draws from the default CPU generator
    threads: int = 1  # intra-op threads that the artifact will run with

    def values(self) -> dict[int, Value]:
        """Every value by id. A repeated id has one geometry (see :func:`check_spec`)."""
        return {v.id: v for v in (*self.input_values(), *self.op_values())}

    def input_values(self) -> Iterator[Value]:
        """Values of the tensor inputs, in order."""
        return (i.value for i in self.inputs if isinstance(i, TensorInput))

    def op_values(self) -> Iterator[Value]:
        """Defined results of all ops, in order."""
        return (v for op in self.ops for v in op.outs if v is not None)

    def input_value(self, position: int) -> Value:
        """Value of tensor input `position`. SpecError if that input is a number."""
        entry = self.inputs[position]
        if not isinstance(entry, TensorInput):
            raise SpecError(f"input {position} is a fed number ({entry.dtype}): only tensors have a value")
        return entry.value


def used_values(arg: Arg) -> tuple[int, ...]:
    """Values that an argument reads."""
    if isinstance(arg, TensorArg):
        return (arg.value,)
    if isinstance(arg, TensorListArg):
        return tuple(v for v in arg.values if v is not None)
    return ()


def fed_inputs(arg: Arg) -> tuple[int, ...]:
    """Number inputs that an argument reads."""
    if isinstance(arg, (FedNumber, FedWrapped)):
        return (arg.input,)
    if isinstance(arg, ListArg):
        return tuple(i.input for i in arg.items if isinstance(i, FedNumber))
    return ()


def check_spec(spec: SegmentSpec) -> None:
    """Raise SpecError, naming the entry, if an invariant does not hold:

    * storages: every value lies within its storage; inputs lie in external ones, an external storage has an input;
    * a value is used after the input or op that defines it; an id that is defined again has the same geometry;
    * outputs are defined, and no two of them share a storage;
    * `mutated` are tensor inputs, none twice; fed numbers are number inputs;
    * publishes are sorted by `after_op`, and their value exists by then;
    * mode and dtypes are known, threads is at least 1.
    """
    _check_storages(spec)
    defined_at = _check_dataflow(spec)
    _check_results(spec, defined_at)
    if spec.mode not in ("commit", "functional"):
        raise SpecError(f"mode {spec.mode!r}: use 'commit' or 'functional'")
    if spec.threads < 1:
        raise SpecError(f"threads is {spec.threads}: give the number of intra-op threads, at least 1")


def _check_storages(spec: SegmentSpec) -> None:
    for value in (*spec.input_values(), *spec.op_values()):
        _check_value(spec, value)
    seen = {v.storage for v in spec.input_values()}
    for index, storage in enumerate(spec.storages):
        if storage.external != (index in seen):
            word = (
                "is external but no input lies in it" if storage.external else "is not external but an input lies in it"
            )
            raise SpecError(f"storage {index} {word}")


def _check_value(spec: SegmentSpec, value: Value) -> None:
    if not 0 <= value.storage < len(spec.storages):
        raise SpecError(f"value {value.id} lies in storage {value.storage}, but there are {len(spec.storages)}")
    if value.dtype not in ITEM_BYTES:
        raise SpecError(f"value {value.id} has dtype {value.dtype!r}: use one of {', '.join(ITEM_BYTES)}")
    if len(value.sizes) != len(value.strides):
        raise SpecError(f"value {value.id} has sizes {value.sizes} and strides {value.strides}")
    end, nbytes = value.extent()[1], spec.storages[value.storage].nbytes
    if end > nbytes:
        raise SpecError(f"value {value.id} ends at byte {end} of storage {value.storage}, which has {nbytes}")


def _check_dataflow(spec: SegmentSpec) -> dict[int, int]:
    """Check definitions before uses; return, per value, the op that first defines it (-1 for inputs)."""
    values: dict[int, Value] = {}
    defined_at: dict[int, int] = {}
    for value in spec.input_values():
        if value.id in values:
            raise SpecError(f"value {value.id} is two inputs: pass it once")
        values[value.id], defined_at[value.id] = value, -1
    for index, op in enumerate(spec.ops):
        _check_uses(spec, index, op, values)
        for out in op.outs:
            if out is None:
                continue
            if values.setdefault(out.id, out).geometry != out.geometry:
                raise SpecError(f"op {index} {op.op}: value {out.id} is defined again with another geometry")
            defined_at.setdefault(out.id, index)
    return defined_at


def _check_uses(spec: SegmentSpec, index: int, op: Op, values: dict[int, Value]) -> None:
    for arg in op.args:
        for used in used_values(arg):
            if used not in values:
                raise SpecError(f"op {index} {op.op} reads value {used}, which nothing before it defines")
        for fed in fed_inputs(arg):
            if not (0 <= fed < len(spec.inputs) and isinstance(spec.inputs[fed], NumberInput)):
                raise SpecError(f"op {index} {op.op} is fed by input {fed}, which is no number input")


def _check_results(spec: SegmentSpec, defined_at: dict[int, int]) -> None:
    values, storages = spec.values(), set[int]()
    for out in spec.outputs:
        if out not in values:
            raise SpecError(f"output {out} is no value of the segment")
        if values[out].storage in storages:
            raise SpecError(
                f"output {out} shares storage {values[out].storage} with another output: return its base once"
            )
        storages.add(values[out].storage)
    for position in spec.mutated:
        if not (0 <= position < len(spec.inputs) and isinstance(spec.inputs[position], TensorInput)):
            raise SpecError(f"mutated input {position} is no tensor input")
    if len(set(spec.mutated)) != len(spec.mutated):
        raise SpecError(f"mutated inputs {spec.mutated} repeat one")
    for entry in spec.inputs:
        if isinstance(entry, NumberInput) and entry.dtype not in NUMBER_DTYPES:
            raise SpecError(f"fed number of dtype {entry.dtype!r}: use one of {', '.join(NUMBER_DTYPES)}")
    _check_publishes(spec, defined_at)


def _check_publishes(spec: SegmentSpec, defined_at: dict[int, int]) -> None:
    order = [p.after_op for p in spec.publishes]
    if order != sorted(order) or (order and not -1 <= order[0] <= order[-1] < len(spec.ops)):
        raise SpecError(f"publishes come after ops {order}: sort them, between -1 and {len(spec.ops) - 1}")
    for publish in spec.publishes:
        if defined_at.get(publish.value, len(spec.ops)) > publish.after_op:
            raise SpecError(f"channel {publish.channel} publishes value {publish.value} before it is defined")
