"""Indices of a graph of `torch.compile`: what they may be, and a look at them before other code than torch's runs it.

Eager raises for an index that is out of range. Compiled code may take another element instead, so that a number comes
back where an error should: OpenVINO's does for any index, ONNX Runtime's and Inductor's for one below zero. So whoever
serves such code looks first. Co-execution does the same for its segments: `index_ranges.py`, which knows the ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from coexec.backends.candidates.candidate import Candidate, CandidateError, raises_on_indices
from coexec.backends.index_part import IndexPart, PartBuilder
from coexec.backends.index_ranges import indices, takes_indices
from coexec.backends.index_sources import IndexSources, Source, arguments_of
from coexec.backends.spec import Arg, Const, Op, TensorArg, TensorListArg, Undefined, Value

FEW = 16  # elements


@dataclass(frozen=True, slots=True)
class InputRange:
    """What comes from `source` must lie in [0, size), or in [-size, size) if it may count `from_end`.

    All of it, also where the graph uses a part: what is out of range in the rest costs the compiled run, not more.
    """

    source: Source
    size: Source  # one number, its `low`, in a dynamic graph plus an input
    from_end: bool
    ignored: int | None  # may be anything

    def bounds(self, inputs: Sequence[Any]) -> tuple[int, int]:
        """[low, high) of what the source's input may be."""
        size: int = self.size.low if self.size.input is None else self.size.low + inputs[self.size.input]
        return (-size if self.from_end else 0) - self.source.low, size - self.source.high

    def holds_at(self, low: int, high: int, value: Any, inputs: Sequence[Any]) -> bool:
        """Whether `value`, with elements from `low` to `high`, keeps it."""
        least, limit = self.bounds(inputs)
        if least <= low and high < limit:
            return True
        if self.ignored is None or self.source.low != self.source.high:
            return False
        rest = value[value != self.ignored - self.source.low] if isinstance(value, torch.Tensor) else None
        return rest is not None and (rest.numel() == 0 or (least <= int(rest.min()) and int(rest.max()) < limit))


Ranges = tuple[tuple[int | None, tuple[InputRange, ...]], ...]
"""Those that each tensor or number must keep, by its position; None: sizes alone decide."""


@dataclass(frozen=True, slots=True)
class GraphIndices:
    """The ranges that inputs must keep, and what is computed of them, and the ops with an index that nobody knows."""

    ranges: Ranges = ()
    unknown: tuple[str, ...] = ()
    part: IndexPart | None = None  # computes, before a call, the indices of which no more is known
    computed: Ranges = ()  # of its results

    def needed_by(self, candidate: Candidate) -> GraphIndices:
        """What to look at before each call of the candidate. Errors: CandidateError where that is not known."""
        if raises_on_indices(candidate):
            return GraphIndices()
        if self.unknown:
            ops = ", ".join(self.unknown)
            reason = f"the graph itself computes an index ({ops}); if it were out of range, a number could come back"
            raise CandidateError(candidate.name, reason)
        return self

    def outside(self, inputs: Sequence[Any]) -> str | None:
        """The first index that is out of range, in words; None if all are as they must be. A few us."""
        problem = _outside(self.ranges, inputs, inputs, "input {}")
        if problem is not None or self.part is None:
            return problem
        try:
            computed = self.part(inputs)
        except Exception as error:  # eager runs, and says it in its own words
            return f"an index cannot be computed: {error!r:.200}"
        return _outside(self.computed, computed, inputs, "computed index {}")


def _outside(wanted: Ranges, values: Sequence[Any], inputs: Sequence[Any], name: str) -> str | None:
    """The first of the values that does not keep its range, in words."""
    for position, ranges in wanted:
        value = 0 if position is None else values[position]
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:
                continue
            low, high = _ends(value)
        else:
            low = high = value
        for one in ranges:
            if not one.holds_at(low, high, value, inputs):
                least, limit = one.bounds(inputs)
                what = "a size" if position is None else name.format(position)
                return f"{what} holds {low} to {high}, and must be in [{least}, {limit})"
    return None


def _ends(value: torch.Tensor) -> tuple[int, int]:
    """The least and the greatest element. Of a few, Python finds them in half the time."""
    if value.numel() <= FEW:
        elements = value.flatten().tolist()
        return int(min(elements)), int(max(elements))
    ends = torch.aminmax(value)
    return int(ends.min.item()), int(ends.max.item())


def graph_indices(module: GraphModule) -> GraphIndices:
    """The indices of a functional graph, of which the nodes have `meta["val"]`, as after tracing."""
    sources, unknown = IndexSources(module), dict[str, None]()
    part = PartBuilder(module, sources.tensors)
    given, computed = dict[InputRange, None](), dict[InputRange, None]()
    for node, index, size, from_end, ignored in _indexings(module, sources.tensors):
        limit = None if index is None else sources.number(size)
        if index is None or limit is None:
            unknown[_name(node)] = None
        elif (wanted := _ranges(sources, index, limit, from_end, ignored)) is not None:
            given |= dict.fromkeys(wanted)
        elif (position := part.add(index)) is not None:
            computed[InputRange(Source(position, 0, 0), limit, from_end, ignored)] = None
        else:
            unknown[_name(node)] = None
    return GraphIndices(_by_position(given), tuple(unknown), part.build(), _by_position(computed))


def _name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _by_position(ranges: Iterable[InputRange]) -> Ranges:
    ordered = sorted(ranges, key=lambda r: -1 if r.source.input is None else r.source.input)
    groups = itertools.groupby(ordered, key=lambda r: r.source.input)
    return tuple((position, tuple(found)) for position, found in groups)


def _ranges(
    sources: IndexSources, index: Node, limit: Source, from_end: bool, ignored: int | None
) -> list[InputRange] | None:
    """What one index asks of the inputs; None if that is unknown, or if it is out of range whatever they are."""
    for known in (sources.of, sources.computed):  # the first is cheap, the second sees what a mask keeps out
        elements = known(index)
        wanted = [InputRange(source, limit, from_end, ignored) for source in elements or ()]
        fixed = [r for r in wanted if r.source.input is None and r.size.input is None]
        if elements is not None and all(map(_always_holds, fixed)):
            return [r for r in wanted if r not in fixed]
    return None


def _always_holds(wanted: InputRange) -> bool:
    """Of a range between constants."""
    least, limit = wanted.bounds(())
    one = wanted.source.low == wanted.source.high
    return least <= 0 < limit or (one and wanted.ignored == wanted.source.low)


Indexing = tuple[Node, Node | None, Any, bool, int | None]
"""(op, index, size, from_end, ignored) as in IndexRange; no index: one that cannot be named."""


def _indexings(module: GraphModule, tensors: dict[Node, torch.Tensor]) -> Iterator[Indexing]:
    """Every index of every op."""
    nodes = list(module.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes) if node in tensors}
    values = {number: _value(number, tensors[node]) for node, number in numbers.items()}
    for node in nodes:
        if not isinstance(node.target, OpOverload) or not takes_indices(node.target.name()):
            continue
        arguments = tuple(_argument(value, numbers) for value in arguments_of(node).values())
        found = list(indices(Op(node.target.name(), arguments, ()), values))
        for index, size, from_end, ignored in found:
            yield node, nodes[index], size, from_end, ignored
        if not found and not all(given in tensors for given in node.all_input_nodes):
            yield node, None, 0, False, None


def _value(number: int, tensor: torch.Tensor) -> Value:
    """As much of it as finding indices takes."""
    return Value(number, number, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())


def _argument(value: Any, numbers: dict[Node, int]) -> Arg:
    if isinstance(value, Node):
        return TensorArg(numbers[value]) if value in numbers else Undefined()
    if isinstance(value, list | tuple) and any(isinstance(v, Node) for v in value):
        return TensorListArg(tuple(numbers.get(v) if isinstance(v, Node) else None for v in value), optional=True)
    return Const(value) if isinstance(value, bool | int | float | str) else Undefined()


__all__ = ["GraphIndices", "InputRange", "graph_indices"]
