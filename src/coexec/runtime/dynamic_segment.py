"""How the native core checks that a pass through a segment is one that an artifact with symbolic sizes was made for.

Every op has facts: the integers of its shapes, as a flat list (csrc/program.h, `facts_of`). What differs between the
observed passes is an expression of the symbols; all else must be as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coexec.backends.expressions import Expression, NotExpressibleError
from coexec.backends.spec import TensorInput
from coexec.backends.symbolic import SymbolicSpec, expressed, unify
from coexec.records import OpKind
from coexec.runtime.spec_builder import BuiltSegment, DescribedOp

Pattern = tuple[list[int], list[tuple[int, int]], list[int]]
"""(facts, [(position, number of the expression)], free positions): csrc/expression.h."""

ANYTHING: Pattern = ([], [], [])

SAME_AT_ALL_SIZES = (
    "nodes",
    "inputs",
    "outputs",
    "mutated",
    "external_inputs",
    "slot_inputs",
    "number_checks",
    "ranges",
    "distances",
)
"""What must not depend on sizes for one artifact to serve several."""


def unify_segments(built: Sequence[BuiltSegment]) -> tuple[SymbolicSpec, dict[str, Any]]:
    """Returns one segment for all of `built`, and the arguments of the native `Segment.make_dynamic`.

    Args:
        built: passes through one segment with different shapes; the native Segment is made from the last of them.

    Raises:
        NotExpressibleError: they differ in something that follows from no size of an input.
    """
    for entry in SAME_AT_ALL_SIZES:
        if any(_within_segment(other, entry) != _within_segment(built[0], entry) for other in built[1:]):
            raise NotExpressibleError(f"the segment's {entry.replace('_', ' ')} depend on sizes")
    spec = unify([one.spec for one in built])
    table = _Table(spec)
    patterns = [table.pattern(ops) for ops in zip(*(one.described for one in built), strict=True)]
    last = built[-1]
    return spec, {
        "symbols": [(source.input, source.dimension) for source in spec.symbols],
        "patterns": patterns,
        "input_patterns": [_input_pattern(last, k, patterns) for k in range(len(last.spec.inputs))],
        "numbers": [table.number(built, position, arg) for position, arg in last.native["number_checks"]],
        "range_sizes": [table.range_size(built, k) for k in range(len(last.native["ranges"]))],
        "distances": [table.distance(built, k) for k in range(len(last.native["distances"]))],
        "expressions": [expression.tokens() for expression in table.expressions],
    }


def _within_segment(built: BuiltSegment, entry: str) -> Any:
    """What the native segment is told, but for the numbers of memory: behind a loop they depend on its trip count."""
    told = built.native[entry]
    if entry == "ranges":
        return [(position, *others) for position, _, *others in told]
    if entry == "distances":
        return [(position, reference) for position, reference, _ in told]
    if entry == "slot_inputs":
        return [(slot, index) for slot, _, index in told]
    return list(told.values()) if entry == "external_inputs" else told


class _Table:
    """The expressions that the patterns of one segment refer to, each once."""

    def __init__(self, spec: SymbolicSpec) -> None:
        self.symbols = spec.values
        self.expressions: dict[Expression, int] = {}

    def expression(self, values: Sequence[Any], name: str) -> int:
        """The number of the expression that gives `values`."""
        return self.expressions.setdefault(expressed(values, self.symbols, name), len(self.expressions))

    def pattern(self, ops: Sequence[DescribedOp | None]) -> Pattern:
        """What the shapes of one op must be."""
        known = [op for op in ops if op is not None]
        if len(known) != len(ops) or not known[0].facts:
            return ANYTHING
        first = known[-1]
        if first.kind == OpKind.VIEW and first.inputs and first.inputs[0][0] < 0:
            return ANYTHING  # of memory from outside: nothing is executed, and whoever uses it is checked
        if len({len(op.facts) for op in known}) != 1:
            raise NotExpressibleError(f"{first.name} has another number of dimensions at other sizes")
        free = _offsets_of_externals(first)
        following = [
            (k, self.expression(values, f"{first.name}, fact {k},"))
            for k, values in enumerate(zip(*(op.facts for op in known), strict=True))
            if len(set(values)) > 1 and k not in free
        ]
        return first.facts, following, free

    def number(self, built: Sequence[BuiltSegment], position: int, arg: int) -> int:
        """The expression of a number that the artifact takes for a constant, or -1 if it is one."""
        values = [op.values[arg] for one in built if (op := one.described[position]) is not None]
        return -1 if len(set(values)) == 1 else self.expression(values, f"argument {arg} of op {position}")

    def range_size(self, built: Sequence[BuiltSegment], number: int) -> int:
        """The expression of how large an index may be, or -1 if that is the same at all sizes."""
        sizes = [one.native["ranges"][number][1] for one in built]
        return -1 if len(set(sizes)) == 1 else self.expression(sizes, f"the size that index range {number} is for")

    def distance(self, built: Sequence[BuiltSegment], number: int) -> int:
        """The expression of how far two inputs lie apart in written memory, or -1 if that is always the same."""
        distances = [one.native["distances"][number][2] for one in built]
        name = f"the distance of inputs {built[0].native['distances'][number][:2]}"
        return -1 if len(set(distances)) == 1 else self.expression(distances, name)


def _geometries(op: DescribedOp) -> tuple[list[int], list[int]]:
    """Where in an op's facts the geometries of its inputs and of its outputs begin; -1 for an undefined output."""
    inputs, outputs, at = [], [], 0
    for _ in op.inputs:
        inputs.append(at)
        at += 4 + 2 * op.facts[at + 3]
    for _ in op.outputs:
        defined = op.facts[at] != 0
        outputs.append(at + 1 if defined else -1)
        at += 1 + (4 + 2 * op.facts[at + 4] if defined else 0)
    return inputs, outputs


def _offsets_of_externals(op: DescribedOp) -> list[int]:
    """Facts that say where in memory from outside a tensor begins, which decides nothing."""
    inputs, outputs = _geometries(op)
    external = [slot < 0 for slot, _, _ in op.inputs]
    free = [at + 2 for at, outside in zip(inputs, external, strict=True) if outside]
    for at, (_, alias, *_) in zip(outputs, op.outputs, strict=True):
        if at >= 0 and alias >= 0 and external[alias]:
            free.append(at + 2)
    return sorted(free)


def _input_pattern(built: BuiltSegment, number: int, patterns: Sequence[Pattern]) -> Pattern | None:
    """What the geometry of input `number` must be; None for a number. An input is some op's input: it is said there."""
    if not isinstance(built.spec.inputs[number], TensorInput):
        return None
    place = built.captured[number]
    op = built.described[place.position]
    assert op is not None
    facts, following, _ = patterns[place.position]
    begin = _geometries(op)[0][place.input]
    end = begin + 4 + 2 * facts[begin + 3]
    return (
        facts[begin:end],
        [(k - begin, expression) for k, expression in following if begin <= k < end],
        [2] if op.inputs[place.input][0] < 0 else [],
    )
