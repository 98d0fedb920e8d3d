"""The part of a program that is worth compiling, and the thin frame around it that stays in torch.

Left to the frame: outputs that are inputs, views of inputs, sizes, numbers and None; outputs that depend on no live
input (a backend folds them, and hands out the same tensor in each call); repeated outputs; inputs that are not used.
What a compiler gets takes tensors only and returns tensors only, each of them computed. So an output that aliases an
input does so with every backend, and no backend has to know about sizes and numbers among the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from coexec.backends.candidates.program import Program, ProgramError, made_from

Tensors = Sequence[torch.Tensor]
Call = Callable[[list[torch.Tensor]], Tensors]
"""What a backend provides: tensors of :attr:`Core.live` in, the core's outputs out."""


@dataclass(frozen=True, slots=True)
class Core:
    """A graph of tensors, and where its inputs come from."""

    module: GraphModule  # takes `sources` in order, returns computed tensors
    sources: tuple[int, ...]  # program input behind each input of the core
    examples: tuple[torch.Tensor, ...]  # its example inputs, in the layout that the core takes
    static: tuple[int, ...]  # inputs of the core that are static inputs of the program
    orders: tuple[tuple[int, ...] | None, ...]  # per input: permutation that makes it row-major, None: taken as it is
    outputs: tuple[OutputLayout, ...]
    finish: GraphModule | None  # (program inputs, core outputs) -> program outputs; None: they are the core outputs
    numbers: tuple[tuple[int, int | float], ...]  # program inputs that were fixed in a static program, with the value
    dynamic: bool = False

    @property
    def live(self) -> tuple[int, ...]:
        """Inputs of the core that change between calls."""
        return tuple(i for i in range(len(self.sources)) if i not in self.static)

    def weights(self) -> dict[int, torch.Tensor]:
        """The static inputs by position in the core, detached; they share memory with the program's."""
        return {i: self.examples[i].detach() for i in self.static}


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """What one output of the core has to look like."""

    dtype: torch.dtype
    sizes: tuple[int, ...] | None  # None: symbolic
    strides: tuple[int, ...] | None  # None: symbolic


def split(program: Program, *, row_major: bool = False, bind_static: bool = True) -> Core:
    """The core of `program`.

    `row_major`: the backend knows dense row-major memory only. Inputs and outputs that are dense in another order of
    dimensions (channels last, transposed) are permuted outside, which costs no copy.
    `bind_static`: static inputs are handed over once, by :meth:`Core.weights`; otherwise they are live.

    Errors: ProgramError if nothing is left to compile.
    """
    return _Split(program, row_major and not program.dynamic, bind_static).core()


def is_view(node: Node) -> bool:
    """Whether an op's results share memory with its inputs and nothing is written."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    infos = [r.alias_info for r in node.target._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def draws_random(module: GraphModule) -> bool:
    """Whether an op of the graph draws random numbers."""
    return any(_draws(node) for node in module.graph.nodes)


def _draws(node: Node) -> bool:
    """Attention kernels are tagged as random for their dropout, also when it is off."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [formal.name for formal in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


class _Split:
    def __init__(self, program: Program, row_major: bool, bind_static: bool) -> None:
        self.program, self.row_major, self.bind_static = program, row_major, bind_static
        self.placeholders = program.placeholders()
        self.position = {node: index for index, node in enumerate(self.placeholders)}
        self.light: set[Node] = set()  # computed by the frame from inputs alone, for free
        for node in program.module.graph.nodes:
            if self._is_light(node):
                self.light.add(node)
        self.light |= self._constant_outputs()
        heavy = [v for v in program.outputs() if isinstance(v, Node) and v not in self.light]
        self.results: list[Node] = list(dict.fromkeys(heavy))
        if not self.results:
            raise ProgramError("nothing is computed: every output is an input, a view of one, a number or constant")

    def _constant_outputs(self) -> set[Node]:
        """Outputs that are the same in each call, as eager computes them: each time anew."""
        static = {self.placeholders[position] for position in self.program.static_inputs}
        constant = {node for node in self.program.module.graph.nodes if node.op == "get_attr" or node in static}
        for node in self.program.module.graph.nodes:
            if node.op == "call_function" and not _draws(node) and constant.issuperset(node.all_input_nodes):
                constant.add(node)
        return {v for v in self.program.outputs() if isinstance(v, Node) and v in constant}

    def _is_light(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        if node.op != "call_function" or not all(n in self.light for n in node.all_input_nodes):
            return False
        return is_view(node) or not _has_tensors(node)

    def core(self) -> Core:
        graph, sources, orders = self._core_graph()
        examples = [_permuted(self.program.inputs[s], o) for s, o in zip(sources, orders, strict=True)]
        static = set(self.program.static_inputs) if self.bind_static else set()
        return Core(
            module=GraphModule(self.program.module, graph),
            sources=tuple(sources),
            examples=tuple(examples),
            static=tuple(i for i, source in enumerate(sources) if source in static),
            orders=tuple(orders),
            outputs=tuple(self._returned(node) for node in self.results),
            finish=self._finish(),
            numbers=() if self.program.dynamic else tuple(self._numbers()),
            dynamic=self.program.dynamic,
        )

    def _numbers(self) -> list[tuple[int, int | float]]:
        values = enumerate(self.program.inputs)
        return [(position, value) for position, value in values if not isinstance(value, torch.Tensor)]

    def _needed(self) -> set[Node]:
        needed: set[Node] = set()
        stack = list(self.results)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        return needed

    def _core_graph(self) -> tuple[Graph, list[int], list[tuple[int, ...] | None]]:
        graph, env = Graph(), {}
        needed = self._needed()
        used = [n for n in self.placeholders if n in needed]
        tensors = [n for n in used if isinstance(self.program.inputs[self.position[n]], torch.Tensor)]
        numbers = [n for n in used if n not in tensors]
        sizes = {n: self._size_of(n, tensors) for n in numbers} if self.program.dynamic else {}
        tensors += [n for n in dict.fromkeys(source for source, _ in sizes.values()) if n not in tensors]
        orders = [self._order(self.program.inputs[self.position[n]]) for n in tensors]
        for node, order in zip(tensors, orders, strict=True):
            env[node] = _placeholder(graph, node, order)
        for node in numbers:
            env[node] = self._number(graph, node, sizes, env)
        for node in self.program.module.graph.nodes:
            if node in needed and node not in env:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(self._result(graph, env[n], n) for n in self.results))
        return graph, [self.position[n] for n in tensors], orders

    def _number(self, graph: Graph, node: Node, sizes: dict[Node, tuple[Node, int]], env: dict[Node, Any]) -> Any:
        """A number among the inputs: its value in a static program, a size of a tensor in a dynamic one."""
        if not self.program.dynamic:
            return self.program.inputs[self.position[node]]
        source, dim = sizes[node]
        size = graph.call_function(torch.ops.aten.sym_size.int, (env[source], dim))
        size.meta = dict(node.meta)
        return size

    def _size_of(self, number: Node, used: list[Node]) -> tuple[Node, int]:
        """A tensor input and its dimension that always has the size `number`."""
        wanted = getattr(getattr(number.meta.get("val"), "node", None), "expr", None)
        candidates = used + [n for n in self.placeholders if n not in used]
        for node in candidates:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if wanted is not None and getattr(getattr(size, "node", None), "expr", None) == wanted:
                    return node, dim
        raise ProgramError(f"number {number.name} is no size of a tensor input")

    def _order(self, value: torch.Tensor) -> tuple[int, ...] | None:
        return dense_order(value.shape, value.stride()) if self.row_major else None

    def _result_order(self, node: Node) -> tuple[int, ...] | None:
        """How a result is permuted to be row-major; None: it is returned as it is."""
        layout = _layout(node)
        if not self.row_major or layout.sizes is None or layout.strides is None:
            return None
        order = dense_order(layout.sizes, layout.strides)
        return order if order is not None and _is_permuted(order) else None

    def _result(self, graph: Graph, node: Node, original: Node) -> Node:
        order = self._result_order(original)
        return node if order is None else graph.call_function(torch.ops.aten.permute.default, (node, list(order)))

    def _returned(self, node: Node) -> OutputLayout:
        layout, order = _layout(node), self._result_order(node)
        if order is None or layout.sizes is None:
            return layout
        sizes = tuple(layout.sizes[d] for d in order)
        return OutputLayout(layout.dtype, sizes, row_major_strides(sizes))

    def _finish(self) -> GraphModule | None:
        """The frame as a graph; None where the core's outputs are the program's."""
        if list(self.program.outputs()) == self.results and all(self._result_order(n) is None for n in self.results):
            return None
        graph = Graph()
        env: dict[Node, Node] = {n: graph.placeholder(f"in{i}") for i, n in enumerate(self.placeholders)}
        for index, node in enumerate(self.results):
            env[node] = self._unpermuted(graph, graph.placeholder(f"out{index}"), node)
        wanted = [v for v in self.program.outputs() if isinstance(v, Node)]
        needed = made_from([node for node in wanted if node in self.light])
        for node in self.program.module.graph.nodes:
            if node in needed and node not in env:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[v] if isinstance(v, Node) else v for v in self.program.outputs()))
        return GraphModule(self.program.module, graph)

    def _unpermuted(self, graph: Graph, node: Node, original: Node) -> Node:
        order = self._result_order(original)
        if order is None:
            return node
        inverse = [order.index(d) for d in range(len(order))]
        return graph.call_function(torch.ops.aten.permute.default, (node, inverse))


def _has_tensors(node: Node) -> bool:
    """Whether the result is (or holds) a tensor. Sizes and their arithmetic are free."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any("Tensor" in str(r.type) for r in node.target._schema.returns)
    value = node.meta.get("val")
    if value is None:
        return True
    return any(isinstance(v, torch.Tensor) for v in (value if isinstance(value, list | tuple) else (value,)))


def _placeholder(graph: Graph, node: Node, order: tuple[int, ...] | None) -> Node:
    new = graph.placeholder(node.name)
    if order is None or not _is_permuted(order):
        new.meta = dict(node.meta)
        return new
    inverse = [order.index(d) for d in range(len(order))]
    return graph.call_function(torch.ops.aten.permute.default, (new, inverse))


def _permuted(value: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return value if order is None or not _is_permuted(order) else value.permute(order)


def _is_permuted(order: Sequence[int]) -> bool:
    return list(order) != sorted(order)


def _layout(node: Node) -> OutputLayout:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ProgramError(f"output {node.name} carries no tensor in its metadata; annotate the program first")
    if any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride())):
        return OutputLayout(value.dtype, None, None)
    return OutputLayout(value.dtype, tuple(value.shape), tuple(value.stride()))


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch gives them."""
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Dimensions from outermost to innermost if memory is dense without gaps and overlap, else None.

    Dimensions of size 1 stay where they are as far as possible, so that a row-major tensor gives 0, 1, 2 ...
    """
    if 0 in sizes:
        return tuple(range(len(sizes)))
    moving = [d for d in range(len(sizes)) if sizes[d] != 1]
    by_stride = sorted(moving, key=lambda d: -strides[d])
    expected = 1
    for dim in reversed(by_stride):
        if strides[dim] != expected:
            return None
        expected *= sizes[dim]
    filled = iter(by_stride)
    return tuple(next(filled) if sizes[d] != 1 else d for d in range(len(sizes)))
