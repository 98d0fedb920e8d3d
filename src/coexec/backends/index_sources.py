"""What the elements of an integer tensor in a graph of `torch.compile` can be, as far as that is known before it runs.

Each is an element of an input plus a constant, or a number between two bounds: those that stand in the graph, or those
of a tensor that depends on no input, which is computed here. Of a tensor that is computed from inputs in another way
nothing is known: `index_part.py` may compute it before a call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy  # has neither stubs nor py.typed
import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from coexec.backends.candidates.program import attribute
from coexec.backends.index_ranges import SAME_ELEMENTS

PASSING = (SAME_ELEMENTS - {"aten::as_strided", "aten::_to_copy"}) | {
    "aten::lift_fresh_copy", "aten::minimum", "aten::maximum",
}  # fmt: skip
"""Ops of whose results every element is an element of a tensor argument. (as_strided may see memory beside it.)"""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
WIDE = (torch.int64, torch.int32)
"""What overflows these was out of every range before. A narrower one may be what is left of a larger number."""


@dataclass(frozen=True, slots=True)
class Source:
    """Elements of input `input`, each plus a number in [low, high]; without an input: numbers in [low, high].

    Where the ends are in a range, so is all between: who asks looks at the ends.
    """

    input: int | None
    low: int
    high: int

    def plus(self, other: Source) -> Source | None:
        """The sum of an element of each; None if both are of inputs."""
        if self.input is not None and other.input is not None:
            return None
        position = other.input if self.input is None else self.input
        return Source(position, self.low + other.low, self.high + other.high)


Sources = frozenset[Source]


def constant(low: int, high: int | None = None) -> Sources:
    """Numbers in [low, high], or this one."""
    return frozenset({Source(None, low, low if high is None else high)})


class IndexSources:
    """Of every integer tensor of one graph, where its elements are from. Nodes need `meta["val"]`, as after tracing."""

    def __init__(self, module: GraphModule) -> None:
        self.tensors = tensors_of(module)  # fake ones but for attributes
        self._numbers: dict[Any, int] = {}  # expression of a size -> the input that is this number
        self._of: dict[Node, Sources] = {}
        placeholders = 0
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._enter(node, placeholders)
                placeholders += 1
            elif (found := self._found(node)) is not None or (found := self.computed(node)) is not None:
                self._of[node] = found

    def of(self, node: Any) -> Sources | None:
        """Where the elements of this node's tensor are from, of a number: what it is. None: nobody knows."""
        if node in self.tensors:
            return self._of.get(node)
        number = self.number(node)
        return None if number is None else frozenset({number})

    def number(self, value: Any) -> Source | None:
        """A size: a constant, or an input that is a number plus a constant. None for anything else."""
        if isinstance(value, Node):
            value = value.meta.get("val")
        if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):  # F.pad makes 3.0 of 3
            return Source(None, int(value), int(value))
        if not isinstance(value, torch.SymInt):
            return None
        for expression, position in [(0, None), *self._numbers.items()]:
            difference = sympy.sympify(value.node.expr - expression)
            if difference.is_Integer:
                return Source(position, int(difference), int(difference))
        return None

    def _enter(self, node: Node, position: int) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._numbers.setdefault(value.node.expr, position)
        elif isinstance(value, torch.Tensor) and value.dtype in INTEGERS:
            self._of[node] = frozenset({Source(position, 0, 0)})

    def _found(self, node: Node) -> Sources | None:
        if node.op == "get_attr":
            tensor = self.tensors.get(node)
            return _between(tensor) if tensor is not None and tensor.dtype in INTEGERS else None
        if node.target is operator.getitem:
            return self._part(node)
        kinds = _kinds(node.meta.get("val"))
        if not isinstance(node.target, OpOverload) or not kinds <= set(INTEGERS):
            return None
        arguments, name = arguments_of(node), node.target.name()
        if name in PASSING:
            given = [tensor for argument in arguments.values() for tensor in self._tensors(argument)]
            same = kinds == {self.tensors[tensor].dtype for tensor in given}
            return self.union(given) if same or kinds <= set(WIDE) else None
        rule = RULES.get(name.removeprefix("aten::").partition(".")[0])
        return rule(self, arguments) if rule is not None and kinds <= set(WIDE) else None

    def computed(self, node: Node) -> Sources | None:
        """Of a tensor that depends on no input: by computing it. None for others."""
        tensor = self.tensors.get(node)
        if tensor is None or tensor.dtype not in INTEGERS:
            return None
        needed = _needed_for(node)
        return None if needed is None else _between(_run(needed, self.tensors))

    def _part(self, node: Node) -> Sources | None:
        """One of several results: of a split, or the positions that a sort returns beside the values."""
        whole, index = node.args
        if not isinstance(whole, Node) or not isinstance(whole.target, OpOverload):
            return None
        if index == 1 and whole.target.name().partition(".")[0] in POSITIONS:
            return _positions(self, arguments_of(whole))
        return self._of.get(whole)

    def _tensors(self, value: Any) -> list[Node]:
        values = value if isinstance(value, list | tuple) else [value]
        return [v for v in values if isinstance(v, Node) and v in self.tensors]

    def union(self, values: Iterable[Any]) -> Sources | None:
        """Elements of any of these tensors and numbers."""
        found = [self.of(value) for value in values]
        known = [sources for sources in found if sources is not None]
        return frozenset[Source]().union(*known) if found and len(known) == len(found) else None


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments by name, defaults included."""
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}
    return defaults | dict(zip(names, node.args, strict=False)) | node.kwargs


def tensors_of(module: GraphModule) -> dict[Node, torch.Tensor]:
    """The tensor that each node stands for, where it is known and one."""
    found: dict[Node, torch.Tensor] = {}
    for node in module.graph.nodes:
        value = attribute(module, node.target) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found[node] = value
    return found


def _kinds(value: Any) -> set[Any]:
    """dtypes of what an op returns; of what is no tensor: None."""
    values = value if isinstance(value, list | tuple) else [value]
    return {v.dtype if isinstance(v, torch.Tensor) else None for v in values}


def _between(value: torch.Tensor) -> Sources:
    """From its smallest to its largest element."""
    return constant(int(value.min()), int(value.max())) if value.numel() else frozenset()


# Tensors that depend on no input --------------------------------------------------------------------------------------

MOST_ELEMENTS = 1 << 20
"""Of a tensor that is computed in order to know what is in it, and of those that it is made from."""


def _needed_for(node: Node) -> list[Node] | None:
    """The nodes that compute this one, in their order; None if an input is among them, or what is better not run."""
    found, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if current.op != "get_attr" and not _may_run(current):
            return None
        new = [given for given in current.all_input_nodes if given not in found]
        found.update(new)
        waiting += new
    return sorted(found)


def _may_run(node: Node) -> bool:
    """Whether it gives the same at each run, changes nothing and is small."""
    value = node.meta.get("val")
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(v, torch.Tensor) and _is_small(v.numel()) for v in values):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return node.target.namespace == "aten" and not drawn and not node.target._schema.is_mutable


def _is_small(elements: Any) -> bool:
    return isinstance(elements, int) and elements <= MOST_ELEMENTS  # a symbol is no int


def _run(nodes: list[Node], attributes: dict[Node, torch.Tensor]) -> torch.Tensor:
    """The tensor of the last node."""
    values: dict[Node, Any] = {}
    with torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                values[node] = attributes[node]
            else:
                given = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*given[0], **given[1])  # type: ignore[operator]
    result: torch.Tensor = values[nodes[-1]]
    return result


# Rules: (sources, arguments by name) of an op whose results are WIDE -------------------------------------------------

Rule = Callable[[IndexSources, dict[str, Any]], Sources | None]


def _copied(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    """_to_copy: of a mask it makes 0 and 1."""
    given = sources.tensors.get(arguments["self"])
    mask = given is not None and given.dtype == torch.bool
    return constant(0, 1) if mask else sources.of(arguments["self"])


def _arange(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    """From its start to before its end; upwards only."""
    start, end = sources.of(arguments.get("start", 0)), sources.number(arguments["end"])
    step = arguments.get("step", 1)
    if start is None or end is None or not isinstance(step, int) or step < 1:
        return None
    return start | {Source(end.input, end.low - 1, end.high - 1)}


def _filled(name: str) -> Rule:
    return lambda sources, arguments: sources.of(arguments[name])


def _one_of(*names: str) -> Rule:
    return lambda sources, arguments: sources.union(arguments[name] for name in names)


def _clamped(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    low, high = arguments.get("min"), arguments.get("max")
    if isinstance(low, int) and isinstance(high, int):
        return constant(min(low, high), high)
    return sources.union(value for value in (arguments["self"], low, high) if value is not None)


def _sum(sign: int) -> Rule:
    def rule(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
        one, other, alpha = sources.of(arguments["self"]), sources.of(arguments["other"]), arguments["alpha"]
        if one is None or other is None or alpha != 1:
            return None
        if sign < 0 and any(source.input is not None for source in other):
            return None
        signed = [Source(s.input, -s.high, -s.low) if sign < 0 else s for s in other]
        sums = [a.plus(b) for a, b in itertools.product(one, signed)]
        known = frozenset(s for s in sums if s is not None)
        return None if None in sums else known

    return rule


def _running_sum(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    tensor, terms = sources.tensors.get(arguments["self"]), sources.of(arguments["self"])
    count = sources.number(1 if tensor is None or not tensor.dim() else tensor.shape[arguments["dim"]])
    if not terms or count is None or any(source.input is not None for source in (count, *terms)):
        return None
    ends = [end * times for source in terms for end in (source.low, source.high) for times in (1, count.low)]
    return constant(min(ends), max(ends))


def _product(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    one, other = sources.of(arguments["self"]), sources.of(arguments["other"])
    if not one or not other or any(source.input is not None for source in one | other):
        return None
    ends = [[end for source in s for end in (source.low, source.high)] for s in (one, other)]
    products = [a * b for a, b in itertools.product(*ends)]
    return constant(min(products), max(products))


def _remainder(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    divisor = arguments["other"]
    return constant(0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


def _positions(sources: IndexSources, arguments: dict[str, Any]) -> Sources | None:
    """Positions along a dimension of a tensor, of all of it where none is given."""
    tensor, dim = sources.tensors.get(arguments["self"]), arguments.get("dim")
    if tensor is None:
        return None
    size = sources.number(tensor.numel() if dim is None else tensor.shape[dim] if tensor.dim() else 1)
    return None if size is None else frozenset({Source(None, 0, 0), Source(size.input, size.low - 1, size.high - 1)})


POSITIONS = frozenset({"aten::sort", "aten::topk", "aten::max", "aten::min"})
"""Ops whose second result is positions in the argument."""

RULES: dict[str, Rule] = {
    "_to_copy": _copied,
    "arange": _arange,
    **dict.fromkeys(("full", "full_like", "new_full"), _filled("fill_value")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda sources, arguments: constant(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda sources, arguments: constant(1)),
    "scalar_tensor": _filled("s"),
    "where": _one_of("self", "other"),
    "masked_fill": _one_of("self", "value"),
    "constant_pad_nd": _one_of("self", "value"),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "cumsum": _running_sum,
    "remainder": _remainder,
    **dict.fromkeys(("index", "index_select", "gather", "take"), _filled("self")),
    **dict.fromkeys(("argmax", "argmin", "argsort"), _positions),
}
"""By the op's name without its overload."""
