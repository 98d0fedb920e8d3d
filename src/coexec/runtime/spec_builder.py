"""From one described iteration to what a backend compiles: SegmentSpec, and how the GraphRunner calls the artifact."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coexec.backends.aliasing import covering_inputs
from coexec.backends.fed import NotLowerableError, takes_fed, takes_integers
from coexec.backends.index_ranges import index_ranges
from coexec.backends.spec import (
    ITEM_BYTES,
    Arg,
    Const,
    FedNumber,
    FedWrapped,
    ListArg,
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
)
from coexec.records import OpKind

EXTERNAL_IDS = 1_000_000_000
"""Value ids of externals start here; those of computed values are the Program's slots."""

VIEW_IDS = 2_000_000_000
"""Value ids of views that no op of the step made, but a `.data =` or an in-place metadata change."""

PASS_IDS = 3_000_000_000
"""Value ids of inputs whose slot is that of another input: several passes of a loop made them."""


class Extent(enum.IntEnum):
    """Which bytes of an input's storage are captured. Same numbers as in csrc/graph_runner.h."""

    TOUCHED = 0  # those that the tensor touches, from a multiple of 16 on
    FROM_THE_TENSOR = 1  # those that it touches, from its first one on
    GIVEN = 2  # those of this very pass, where several inputs look at them
    WHOLE = 3  # all of a small storage, where several inputs look at it and the captured pass may have other sizes


class NotDescribableError(Exception):
    """The segment holds something that a spec cannot say; it stays on replay."""


@dataclass(frozen=True, slots=True)
class DescribedOp:
    """One op of the described iteration; fields as csrc/bind_trace.h export_description gives them."""

    node: int
    kind: int
    name: str
    arg_types: list[tuple[str, bool, int, str, tuple[bool, ...]]]  # (type, fed, ArgClass, wrapped dtype, present)
    values: list[Any]
    inputs: list[tuple[int, int, dict[str, Any] | None]]  # (slot, external number, geometry)
    outputs: list[tuple[int, int, bool, dict[str, Any] | None, int]]  # (slot, alias, same argument, geometry, nbytes)
    facts: list[int]  # what the shapes of its pass are compared by (csrc/program.h facts_of)
    memories: list[tuple[int, bool, int]]  # per input: (sid, of several passes that made it: the latest?, bytes)


@dataclass(slots=True)
class CapturedInput:
    """Where the bytes of one input are found while the segment is replayed."""

    position: int
    input: int  # flattened input, or -1 for a number
    arg: int = 0
    element: int = -1
    number_type: str = ""
    storage: int = -1  # index in `SegmentSpec.storages`


@dataclass(slots=True)
class BuiltSegment:
    """A segment ready to be compiled."""

    spec: SegmentSpec
    native: dict[str, Any]  # arguments of Step.make_segment
    captured: list[CapturedInput]  # per input of the spec
    offsets: dict[int, int]  # storages that were made to begin at their only input
    described: list[DescribedOp | None]  # per node


@dataclass(slots=True)
class _Builder:
    """State of one build."""

    ops: dict[int, DescribedOp]
    externals: Sequence[tuple[int, int, dict[str, Any]]]  # (storage, nbytes, geometry)
    geometry_of_slot: dict[int, dict[str, Any]]
    storage_of_slot: dict[int, int]  # slot that made the memory of every value described
    inputs: list[TensorInput | NumberInput] = field(default_factory=list)
    native_inputs: list[tuple[Any, ...]] = field(default_factory=list)
    captured: list[CapturedInput] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    storage_index: dict[tuple[str, int], int] = field(default_factory=dict)  # ("e"/"s", number) -> index
    identity_of: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, memory) of an input -> value id
    values: dict[int, Value] = field(default_factory=dict)
    input_of_value: dict[int, int] = field(default_factory=dict)
    spec_ops: list[Op] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # external storages (index) that are written
    written_values: set[int] = field(default_factory=set)  # through which they are written
    made: set[int] = field(default_factory=set)  # memory (sid) made in the segment
    external_inputs: dict[int, int] = field(default_factory=dict)
    number_checks: list[tuple[int, int]] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)  # bytes before a storage that was made to begin at its input
    next_view: int = VIEW_IDS


def build_segment(
    nodes: Sequence[int],
    commit: bool,
    description: Sequence[DescribedOp],
    externals: Sequence[tuple[int, int, dict[str, Any]]],
    survivors: set[int],
    random_nodes: set[int],
    writes: dict[int, tuple[int, ...]],
    threads: int,
) -> BuiltSegment:
    """Returns the spec of the segment that consists of `nodes`.

    Args:
        nodes: of the segment, contiguous in the described path.
        commit: writes in place, after validation.
        description, externals: of one iteration that went through the segment.
        survivors: slots whose memory was seen to be held beyond its segment.
        random_nodes: nodes that draw from the default generator.
        writes: input positions that a node writes.
        threads: intra-op threads of the artifact.

    Raises:
        NotDescribableError: an op uses something that a spec cannot say.
    """
    by_node = {op.node: op for op in description}
    builder = _Builder(by_node, externals, {}, {})
    _note_slots(builder, description)
    for position, node in enumerate(nodes):
        op = by_node.get(node)
        if op is not None:
            _add(builder, position, op, writes.get(node, ()))
    outputs = [slot for slot in sorted(builder.made) if slot in survivors]
    written = _written_inputs(builder)
    _normalize_offsets(builder)
    spec = SegmentSpec(
        storages=tuple(builder.storages),
        inputs=tuple(builder.inputs),
        ops=tuple(builder.spec_ops),
        outputs=tuple(outputs),
        mutated=tuple(written),
        mode="commit" if commit else "functional",
        publishes=tuple(builder.publishes),
        random=any(node in random_nodes for node in nodes),
        threads=threads,
    )
    spec = dataclasses.replace(spec, mutated=_one_per_memory(spec))
    native = {
        "nodes": list(nodes),
        "commit": commit,
        "random": spec.random,
        "inputs": [_mark_written(builder, index, entry) for index, entry in enumerate(builder.native_inputs)],
        "outputs": outputs,
        "mutated": list(spec.mutated),
        "external_inputs": builder.external_inputs,
        "slot_inputs": [(*key, builder.input_of_value[value]) for key, value in builder.identity_of.items()],
        "number_checks": builder.number_checks,
        "ranges": [(r.input, r.size, r.from_end, r.ignored) for r in index_ranges(spec)],
        "distances": _distances(builder),
        "publishes": [publish.channel for publish in builder.publishes],
    }
    return BuiltSegment(spec, native, builder.captured, builder.offsets, [by_node.get(node) for node in nodes])


def _written_inputs(builder: _Builder) -> list[int]:
    """Inputs through which external memory is written. A weight also read transposed is two inputs, one written.

    Raises:
        NotDescribableError: a write goes through a view that is no input itself.
    """
    positions = {builder.input_of_value.get(value, -1) for value in builder.written_values}
    if -1 in positions:
        raise NotDescribableError("memory from outside is written through a view made in the segment")
    return sorted(positions)


def _one_per_memory(spec: SegmentSpec) -> tuple[int, ...]:
    """`spec.mutated` with one input per piece of memory: of written views that overlap, the one that covers all."""
    try:
        return covering_inputs(spec)
    except NotLowerableError:
        return spec.mutated  # the compile worker says the same, and why


def _distances(builder: _Builder) -> list[tuple[int, int, int]]:
    """Inputs that share memory which is written: (input, the first one in that memory, bytes from its beginning)."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for index, entry in enumerate(builder.inputs):
        if isinstance(entry, TensorInput) and entry.value.storage in builder.written:
            begin = entry.value.offset * ITEM_BYTES[entry.value.dtype]
            reference, reference_begin = first.setdefault(entry.value.storage, (index, begin))
            if reference != index:
                found.append((index, reference, begin - reference_begin))
    return found


def _normalize_offsets(builder: _Builder) -> None:
    """External memory seen through one input begins at that input: a batch that is a moving slice is one artifact."""
    users: dict[int, list[int]] = {}
    for index, entry in enumerate(builder.inputs):
        if isinstance(entry, TensorInput):
            users.setdefault(entry.value.storage, []).append(index)
    views = {value.storage for value in builder.values.values() if builder.input_of_value.get(value.id) is None}
    for storage, indices in users.items():
        entry = builder.inputs[indices[0]]
        if len(indices) > 1 or storage in views or not isinstance(entry, TensorInput):
            continue
        value = dataclasses.replace(entry.value, offset=0)
        builder.inputs[indices[0]] = TensorInput(value)
        builder.values[value.id] = value
        builder.storages[storage] = Storage(value.extent()[1], True)
        builder.offsets[storage] = entry.value.extent()[0]
    _renew_results(builder)


def _renew_results(builder: _Builder) -> None:
    """In-place ops return their argument: the value as it is described now."""
    for index, op in enumerate(builder.spec_ops):
        outs = tuple(None if out is None else builder.values[out.id] for out in op.outs)
        builder.spec_ops[index] = dataclasses.replace(op, outs=outs)


def _note_slots(builder: _Builder, description: Sequence[DescribedOp]) -> None:
    """Which memory every value of the iteration lives in; of a value that a loop makes several times, the last one."""
    for op in description:
        for slot, alias, _, geometry, _ in op.outputs:
            if slot < 0 or geometry is None:
                continue
            builder.geometry_of_slot[slot] = geometry
            if alias < 0:
                builder.storage_of_slot[slot] = slot
            else:
                base = op.inputs[alias][0]
                builder.storage_of_slot[slot] = builder.storage_of_slot.get(base, base)


def _mark_written(builder: _Builder, index: int, entry: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(entry) == 4:
        return entry
    position, flat, slot, latest, storage = entry
    return (position, flat, slot, latest, storage in builder.written, storage)


def _add(builder: _Builder, position: int, op: DescribedOp, writes: tuple[int, ...]) -> None:
    """Appends one op: bind its inputs, translate its arguments, define its outputs."""
    kind = OpKind(op.kind)
    if kind == OpKind.FETCH:
        slot = op.inputs[0][0]
        if slot in builder.values:  # else an earlier segment, or the outside, has it already
            value = _value(builder, position, 0, op)
            builder.publishes.append(Publish(len(builder.spec_ops) - 1, value, position))
        return
    if kind not in (OpKind.COMPUTE, OpKind.VIEW):
        return
    if kind == OpKind.VIEW and (not op.inputs or op.inputs[0][0] not in builder.values):
        return  # a view of memory from before the segment is an input of whoever uses it
    ids = [_value(builder, position, index, op) for index in range(len(op.inputs))]
    for index in writes:
        storage = builder.values[ids[index]].storage
        if builder.storages[storage].external:
            builder.written.add(storage)
            builder.written_values.add(ids[index])
    outs = tuple(_define(builder, op, ids, out) for out in op.outputs)
    if kind == OpKind.VIEW and any(same for _, _, same, _, _ in op.outputs):
        _as_strided(builder, ids[0], outs[0])  # t_(), squeeze_(): the tensor changed, the memory did not
        return
    args = _arguments(builder, position, op, ids)
    builder.spec_ops.append(Op(op.name, tuple(args), outs))


def _as_strided(builder: _Builder, source: int, out: Value | None) -> None:
    if out is None:
        return
    args = (TensorArg(source), Const(out.sizes), Const(out.strides), Const(out.offset))
    builder.spec_ops.append(Op("aten::as_strided", args, (out,)))


def _value(builder: _Builder, position: int, index: int, op: DescribedOp) -> int:
    """Returns the id of an op's input, made an input of the segment if nothing before defined it."""
    slot, external, geometry = op.inputs[index]
    memory, latest, nbytes = op.memories[index]
    if geometry is None:
        raise NotDescribableError(f"input {index} of node at position {position} is no strided CPU tensor")
    if slot < 0:
        identity = EXTERNAL_IDS + builder.external_inputs.get(external, len(builder.inputs))
        if identity not in builder.values:
            number, nbytes, _ = builder.externals[external]
            _bind(builder, identity, ("e", number), nbytes, geometry, (position, index, -1, True))
            builder.external_inputs[external] = builder.input_of_value[identity]
        return identity
    identity = _identity(builder, slot, memory)
    if identity not in builder.values:
        root = builder.storage_of_slot.get(slot, slot)
        if latest and builder.geometry_of_slot.get(slot) != geometry:
            raise NotDescribableError(f"a value of an earlier segment is seen through another geometry: slot {slot}")
        _bind(builder, identity, ("s", memory), nbytes, geometry, (position, index, root, latest))
        builder.identity_of[slot, memory] = identity
        return identity
    value = builder.values[identity]
    if _geometry_of(value) == geometry:
        return identity
    builder.next_view += 1
    view = _make_value(builder.next_view, value.storage, geometry)
    builder.values[view.id] = view
    _as_strided(builder, identity, view)
    return view.id


def _identity(builder: _Builder, slot: int, memory: int) -> int:
    """Returns the value id of a computed value: its slot, unless it is another pass's value of a slot read already."""
    known = builder.identity_of.get((slot, memory))
    if known is not None:
        return known
    return PASS_IDS + len(builder.identity_of) if slot in builder.input_of_value else slot


def _bind(
    builder: _Builder, identity: int, memory: tuple[str, int], nbytes: int, geometry: dict[str, Any],
    place: tuple[int, int, int, bool],
) -> None:  # fmt: skip
    """Makes a value an input of the segment; `place` is (position, input, slot of its memory or -1, latest pass)."""
    storage = builder.storage_index.get(memory)
    if storage is None:
        storage = builder.storage_index[memory] = len(builder.storages)
        builder.storages.append(Storage(nbytes, True))
    value = _make_value(identity, storage, geometry)
    builder.values[identity] = value
    builder.input_of_value[identity] = len(builder.inputs)
    builder.inputs.append(TensorInput(value))
    position, index, slot, latest = place
    builder.native_inputs.append((position, index, slot, latest, storage))
    builder.captured.append(CapturedInput(position, index, storage=storage))


def _define(
    builder: _Builder, op: DescribedOp, ids: list[int], out: tuple[int, int, bool, dict[str, Any] | None, int]
) -> Value | None:
    """Returns the value that an output is."""
    slot, alias, same, geometry, nbytes = out
    if geometry is None:
        return None
    if alias >= 0:
        base = builder.values[ids[alias]]
        described = _geometry_of(base)
        if slot < 0 and same:
            described |= {"offset": geometry["offset"]}  # a moving slice: op and argument agree, wherever it is now
        if same and described == geometry:
            return base
        if slot < 0:
            raise NotDescribableError(f"{op.name} returns a view of memory from outside")
        value = builder.values.get(slot)
        if value is None:
            value = builder.values[slot] = _make_value(slot, base.storage, geometry)
        return value
    storage = builder.storage_index[("s", slot)] = len(builder.storages)
    builder.storages.append(Storage(nbytes, False))
    builder.made.add(slot)
    value = builder.values[slot] = _make_value(slot, storage, geometry)
    return value


def _arguments(builder: _Builder, position: int, op: DescribedOp, ids: list[int]) -> list[Arg]:
    args: list[Arg] = []
    at = 0
    for index, ((kind, fed, arg_class, dtype, present), value) in enumerate(zip(op.arg_types, op.values, strict=True)):
        if kind == "tensor":
            args.append(TensorArg(ids[at]))
            at += 1
        elif kind == "list":
            taken = sum(present)
            members = iter(ids[at : at + taken])
            at += taken
            args.append(TensorListArg(tuple(next(members) if there else None for there in present), arg_class == 2))
        elif kind == "undefined":
            args.append(Undefined())
        elif kind == "wrapped":
            args.append(_wrapped(builder, position, index, fed, dtype, value))
        elif kind == "number" and fed:
            args.append(_fed(builder, position, index, value, op.name))
        elif isinstance(value, tuple) and value[:1] == ("device",):
            args.append(Const(value[1], "device"))
        else:
            args.append(Const(value))
    return args


def _wrapped(builder: _Builder, position: int, index: int, fed: bool, dtype: str, value: Any) -> Arg:
    if not fed:
        return WrappedNumber(value, dtype)
    return FedWrapped(_number(builder, position, index, -1, value), dtype)


def _fed(builder: _Builder, position: int, index: int, value: Any, op: str) -> Arg:
    """A number that varies. Where the artifact cannot take it as an input, it is made for this value and checked for
    it. Lists of sizes need no check: another one is another variant."""
    can_be_input = takes_fed(op, index)
    if can_be_input and isinstance(value, float | complex):
        return FedNumber(_number(builder, position, index, -1, value))
    if can_be_input and isinstance(value, tuple) and value and all(isinstance(item, float) for item in value):
        return ListArg(tuple(FedNumber(_number(builder, position, index, k, item)) for k, item in enumerate(value)))
    if not (isinstance(value, tuple) and takes_integers(op, index)):
        builder.number_checks.append((position, index))
    return Const(value)


def _number(builder: _Builder, position: int, index: int, element: int, value: Any) -> int:
    name = "bool" if isinstance(value, bool) else {int: "int64", float: "float64"}.get(type(value), "complex128")
    builder.inputs.append(NumberInput(name))
    builder.native_inputs.append((position, index, element, name))
    builder.captured.append(CapturedInput(position, -1, index, element, name))
    return len(builder.inputs) - 1


def _make_value(identity: int, storage: int, geometry: dict[str, Any]) -> Value:
    if geometry.get("lazy_bits"):
        raise NotDescribableError("a conjugated or negated view, whose memory is read as something else than it holds")
    return Value(
        identity, storage, geometry["dtype"], tuple(geometry["sizes"]), tuple(geometry["strides"]), geometry["offset"]
    )


def _geometry_of(value: Value) -> dict[str, Any]:
    """As the native core describes it; a value of a spec is never a lazy view (see `_make_value`)."""
    facts = {"dtype": value.dtype, "sizes": value.sizes, "strides": value.strides, "offset": value.offset}
    return facts | {"lazy_bits": 0}


def capture_plan(built: BuiltSegment, any_size: bool = False) -> list[tuple[Any, ...]]:
    """Returns the items of a native Capture: one per storage (all its inputs together) and one per number.

    Args:
        built: a pass through the segment.
        any_size: the captured pass may have other sizes than that one.
    """
    shared = Extent.WHOLE if any_size else Extent.GIVEN
    items: list[tuple[Any, ...]] = []
    users = Counter(value.storage for value in built.spec.input_values())
    for storage, (low, high) in _touched(built.spec).items():
        first = next(c for c in built.captured if c.storage == storage)
        extent = Extent.FROM_THE_TENSOR if storage in built.offsets else Extent.TOUCHED
        extent = shared if users[storage] > 1 else extent
        items.append((first.position, first.input, int(extent), low, high - low))
    items += [(c.position, c.arg, c.element, c.number_type) for c in built.captured if c.input < 0]
    return items


def snapshot_index(
    built: BuiltSegment, pieces: Sequence[tuple[int, int, int]], generator: tuple[int, int] | None
) -> dict[str, Any]:
    """Returns the JSON index (backends/snapshot.py) of a captured file.

    Args:
        built: the segment, of the very pass that was captured.
        pieces: (start in the file, bytes, first byte in the storage), in the order of `capture_plan`.
        generator: start and bytes of its state, if it draws.

    Raises:
        NotDescribableError: the bytes that inputs share lie elsewhere than in the pass that `capture_plan` knew.
    """
    touched = _touched(built.spec)
    for storage, (_, nbytes, low), (first, last) in zip(touched, pieces, touched.values(), strict=False):
        if storage not in built.offsets and not low <= first <= last <= low + nbytes:
            raise NotDescribableError(f"bytes {first} to {last} of storage {storage} were not captured")
    storages = [{"start": start, "nbytes": nbytes} for start, nbytes, _ in pieces[: len(touched)]]
    place = {storage: index for index, storage in enumerate(touched)}
    numbers = iter(pieces[len(touched) :])
    tensors: list[dict[str, Any]] = []
    for entry in built.spec.inputs:
        if isinstance(entry, NumberInput):
            storages.append({"start": next(numbers)[0], "nbytes": ITEM_BYTES[entry.dtype]})
            shape: dict[str, Any] = {"sizes": [], "strides": [], "offset": 0}
            tensors.append({"storage": len(storages) - 1, "dtype": entry.dtype, **shape})
            continue
        value = entry.value
        low = 0 if value.storage in built.offsets else pieces[place[value.storage]][2]
        tensors.append({
            "storage": place[value.storage], "dtype": value.dtype, "sizes": list(value.sizes),
            "strides": list(value.strides), "offset": value.offset - low // ITEM_BYTES[value.dtype],
        })  # fmt: skip
    described = None if generator is None else {"start": generator[0], "nbytes": generator[1]}
    return {"storages": storages, "tensors": tensors, "generator": described}


def _touched(spec: SegmentSpec) -> dict[int, tuple[int, int]]:
    """Bytes [low, high) of every external storage that its inputs touch, by storage in order of first use."""
    touched: dict[int, tuple[int, int]] = {}
    for value in spec.input_values():
        low, high = value.extent()
        low = low // 16 * 16
        known = touched.get(value.storage)
        touched[value.storage] = (min(low, known[0]), max(high, known[1])) if known else (low, high)
    return touched
