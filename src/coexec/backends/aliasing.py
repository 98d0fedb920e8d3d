"""Inputs that share memory: which of them one compiled graph may treat as separate tensors.

A functional graph knows no shared memory. Inputs that only read a storage are independent of each other. Where the
segment writes, inputs whose bytes overlap become views of one of them, the base; bytes that do not overlap stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from coexec.backends.fed import NotLowerableError
from coexec.backends.ops import written_values
from coexec.backends.spec import SegmentSpec, SpecError, TensorInput


@dataclass(frozen=True, slots=True)
class Plan:
    """How the inputs of a segment are presented to the graph."""

    base_of: dict[int, int]  # input -> the input that it becomes a view of
    written_bases: tuple[int, ...]  # inputs whose memory the segment writes, none a view of another


def plan_inputs(spec: SegmentSpec) -> Plan:
    """Group the inputs of written storages. NotLowerableError if a group has no member that covers it."""
    values = spec.values()
    written = {
        values[v].storage for op in spec.ops for v in written_values(op) if spec.storages[values[v].storage].external
    }
    base_of: dict[int, int] = {}
    for group in (g for storage in sorted(written) for g in _overlapping(spec, storage)):
        base = _base(spec, group)
        base_of |= dict.fromkeys(group, base)
    return Plan(base_of, tuple(sorted(set(base_of.values()))))


def covering_inputs(spec: SegmentSpec) -> tuple[int, ...]:
    """Returns `spec.mutated` with one input per group of overlapping ones: it holds whatever is written in the group.

    Raises:
        NotLowerableError: a group has no member that covers it.
    """
    plan = plan_inputs(spec)
    chosen: dict[int, int] = {}
    for position in spec.mutated:
        base = plan.base_of.get(position, position)
        whole = spec.input_value(position).extent() == spec.input_value(base).extent() and _is_dense(spec, position)
        chosen.setdefault(base, base)
        if whole and chosen[base] == base:  # the written tensor itself, rather than its transposed view
            chosen[base] = position
    return tuple(sorted(chosen.values()))


def check_writes(spec: SegmentSpec) -> None:
    """Raise SpecError if external memory is written that no input in `spec.mutated` covers: it would be lost."""
    values = spec.values()
    covered: dict[int, list[tuple[int, int]]] = {}
    for position in spec.mutated:
        value = spec.input_value(position)
        covered.setdefault(value.storage, []).append(value.extent())
    for index, op in enumerate(spec.ops):
        for written in (values[v] for v in written_values(op)):
            known = covered.get(written.storage, [])
            if spec.storages[written.storage].external and not _covers(known, written.extent()):
                raise SpecError(
                    f"op {index} {op.op} writes value {written.id} in external storage {written.storage}, but no input "
                    f"in `mutated` {spec.mutated} covers it (see UNDECLARED_WRITES for writes that no schema declares)"
                )


def _covers(ranges: list[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    """The union of `ranges` holds all of `wanted`."""
    reached = wanted[0]
    for low, high in sorted(ranges):
        if low <= reached < high:
            reached = high
    return reached >= wanted[1]


def _overlapping(spec: SegmentSpec, storage: int) -> list[list[int]]:
    """Inputs in `storage`, grouped by overlapping ranges of bytes."""
    members = [i for i, e in enumerate(spec.inputs) if isinstance(e, TensorInput) and e.value.storage == storage]
    members.sort(key=lambda i: spec.input_value(i).extent())
    groups: list[list[int]] = []
    end = -1
    for member in members:
        low, high = spec.input_value(member).extent()
        if low >= end:
            groups.append([])
        groups[-1].append(member)
        end = max(end, high)
    return groups


def _base(spec: SegmentSpec, group: list[int]) -> int:
    """The member that covers all bytes of the group: dense, of one dtype with the others."""
    low = min(spec.input_value(i).extent()[0] for i in group)
    high = max(spec.input_value(i).extent()[1] for i in group)
    if len(group) == 1:
        return group[0]
    same_dtype = len({spec.input_value(i).dtype for i in group}) == 1
    for member in group:
        if same_dtype and spec.input_value(member).extent() == (low, high) and _is_dense(spec, member):
            return member
    raise NotLowerableError(
        f"inputs {group}", "they share memory that is written, and none of them covers it: pass their base too"
    )


def _is_dense(spec: SegmentSpec, member: int) -> bool:
    """Every element of the range is an element of the tensor, once."""
    value = spec.input_value(member)
    expected = 1
    for size, stride in sorted(zip(value.sizes, value.strides, strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
