"""Indices of a graph of `torch.compile`: what they may be, and a look at them before other code than torch's runs it.

Eager raises for an index that is out of range. Compiled code may take another element instead, so that a number comes
back where an error should: OpenVINO's does for any index, ONNX Runtime's and Inductor's for one below zero. So whoever
serves such code looks first. Co-execution does the same for its segments: `index_ranges.py`, which knows the ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from coexec.backends.candidates.candidate import Candidate, CandidateError, raises_on_indices
from coexec.backends.index_ranges import indices, takes_indices
from coexec.backends.index_sources import IndexSources, Source, arguments_of
from coexec.backends.spec import Arg, Const, Op, TensorArg, TensorListArg, Undefined, Value


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


@dataclass(frozen=True, slots=True)
class GraphIndices:
    """The ranges that inputs must keep, by the input, and the ops with an index that nobody knows before they run."""

    ranges: tuple[tuple[int | None, tuple[InputRange, ...]], ...] = ()  # None: sizes alone decide
    unknown: tuple[str, ...] = ()

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
        """The first input with an index that is out of range, in words; None if all are as they must be. A few us."""
        for position, ranges in self.ranges:
            value = 0 if position is None else inputs[position]
            if isinstance(value, torch.Tensor):
                if value.numel() == 0:
                    continue
                least, most = torch.aminmax(value)
                low, high = int(least.item()), int(most.item())
            else:
                low = high = value
            for wanted in ranges:
                if not wanted.holds_at(low, high, value, inputs):
                    return _in_words(position, (low, high), wanted.bounds(inputs))
        return None


def _in_words(position: int | None, found: tuple[int, int], bounds: tuple[int, int]) -> str:
    what = "a size" if position is None else f"input {position}"
    return f"{what} holds {found[0]} to {found[1]}, and must be in [{bounds[0]}, {bounds[1]})"


def graph_indices(module: GraphModule) -> GraphIndices:
    """The indices of a functional graph, of which the nodes have `meta["val"]`, as after tracing."""
    sources, unknown = IndexSources(module), dict[str, None]()
    found: dict[InputRange, None] = {}
    for node, index, size, from_end, ignored in _indexings(module, sources.tensors):
        wanted = None if index is None else _ranges(sources, index, size, from_end, ignored)
        if wanted is None:
            unknown[str(node.target).removeprefix("aten.").partition(".")[0]] = None
        found |= dict.fromkeys(wanted or ())
    by_input = sorted(found, key=lambda r: -1 if r.source.input is None else r.source.input)
    groups = itertools.groupby(by_input, key=lambda r: r.source.input)
    return GraphIndices(tuple((position, tuple(ranges)) for position, ranges in groups), tuple(unknown))


def _ranges(
    sources: IndexSources, index: Node, size: Any, from_end: bool, ignored: int | None
) -> list[InputRange] | None:
    """What one index asks of the inputs; None if that is unknown, or if it is out of range whatever they are."""
    limit = sources.number(size)
    if limit is None:
        return None
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
