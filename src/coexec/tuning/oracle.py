"""The oracle of a program: its ops one by one as eager runs them, and in lockstep the same in float64.

Random draws and integers of the float64 run are those of the float32 run, so both follow one path (README, promise on
numerics). A noisy run rounds every op's result differently: it says how far eager itself moves under rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from coexec.backends.candidates.program import Program, attribute
from coexec.errors import CoexecError

WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.float64: torch.float64, torch.complex32: torch.complex128, torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}  # fmt: skip
"""The dtype that stands for each floating-point dtype in the float64 run."""

Outputs = tuple[Any, ...]


class NoWideRunError(CoexecError):
    """This program cannot be run in float64; the message says why."""


def run_narrow(program: Program, inputs: Sequence[Any], *, noise: torch.Generator | None = None) -> Outputs:
    """The program op by op on `inputs`, which are left alone.

    `noise`: every floating-point result changes by a unit in its last place, up or down: another rounding, as another
    kernel for the same op would have it.
    """
    run = _Run(program, inputs)
    with torch.no_grad():
        for node in program.module.graph.nodes:
            run.step(node, noise)
    return run.outputs


def run_pair(program: Program, inputs: Sequence[Any]) -> tuple[Outputs, Outputs]:
    """The program as it is and, in lockstep, in float64.

    Errors: NoWideRunError if a float64 run means nothing here (memory read as another dtype, an op without float64).
    """
    narrow, wide = _Run(program, inputs), _Run(program, [widen(value) for value in inputs])
    with torch.no_grad():
        for node in program.module.graph.nodes:
            narrow.step(node, None, keep=True)
            wide.step_wide(node, narrow)
            for run in (narrow, wide):
                run.forget_after(node)
    return narrow.outputs, wide.outputs


class _Run:
    """One pass over the nodes: what stands for each value now. Values are dropped after their last use."""

    def __init__(self, program: Program, inputs: Sequence[Any]) -> None:
        self.module = program.module
        self.inputs: Iterator[Any] = iter(inputs)
        self.values: dict[Node, Any] = {}
        self.uses: Counter[Node] = Counter()
        for node in self.module.graph.nodes:
            self.uses.update(node.all_input_nodes)
        self.outputs: Outputs = ()

    def step(self, node: Node, noise: torch.Generator | None, keep: bool = False) -> None:
        """Run one node as it is."""
        self.values[node] = self.value_of(node, lambda value: value)
        if noise is not None and node.op == "call_function" and not draws(node):
            self.values[node] = tree_map(lambda value: disturbed(value, noise), self.values[node])
        if not keep:
            self.forget_after(node)

    def step_wide(self, node: Node, narrow: _Run) -> None:
        """Run one node in float64, after `narrow` ran it."""
        theirs = narrow.values[node]
        if node.op == "call_function" and draws(node):
            self.values[node] = self.drawn(node, narrow)
        elif node.op == "output":
            self.values[node] = self.value_of(node, lambda value: value)
        else:
            try:
                mine = self.value_of(node, lambda value: WIDE.get(value, value) if _is_dtype(value) else value)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                raise NoWideRunError(f"{node.target} has no float64 run: {error}") from error
            self.values[node] = _followed(node, mine, theirs)

    def drawn(self, node: Node, narrow: _Run) -> Any:
        """Results of a random op: the float32 run's. native_dropout draws only its mask; the rest follows from it."""
        theirs = narrow.values[node]
        if node.target is not torch.ops.aten.native_dropout.default:
            return tree_map(widen, theirs)
        source, probability = self.filled(node.args[0]), float(self.filled(node.args[1]))
        scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
        return source * theirs[1] * scale, theirs[1]

    def value_of(self, node: Node, convert: Callable[[Any], Any]) -> Any:
        """What the node gives, its literal arguments converted first."""
        if node.op == "placeholder":
            return next(self.inputs)
        if node.op == "get_attr":
            value = attribute(self.module, node.target)
            return widen(value) if convert(torch.float32) is torch.float64 else value
        args, kwargs = tree_map(convert, (self.filled(node.args), self.filled(node.kwargs)))
        if node.op == "output":
            self.outputs = tuple(args[0]) if isinstance(args[0], list | tuple) else (args[0],)
            return self.outputs
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def filled(self, argument: Any) -> Any:
        """The argument with nodes replaced by their values."""
        return torch.fx.node.map_arg(argument, self.values.__getitem__)

    def forget_after(self, node: Node) -> None:
        """Drop the inputs of `node` that nobody needs any more."""
        for used in node.all_input_nodes:
            self.uses[used] -= 1
            if not self.uses[used]:
                self.values.pop(used, None)


def draws(node: Node) -> bool:
    """The node draws random numbers, with these arguments: attention and dropout may be told not to."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    named = {formal.name: formal.default_value for formal in target._schema.arguments if formal.has_default_value()}
    named |= dict(node.kwargs) | {f.name: a for f, a in zip(target._schema.arguments, node.args, strict=False)}
    off = [named[name] for name in ("dropout_p", "train", "training") if name in named]
    return not any(value is False or (isinstance(value, float) and value == 0.0) for value in off)


def widen(value: Any) -> Any:
    """A float64 (complex128) copy of a floating-point tensor; other values as they are."""
    if isinstance(value, torch.Tensor) and value.dtype in WIDE:
        return value.detach().to(WIDE[value.dtype], copy=True)
    return value


def disturbed(value: Any, noise: torch.Generator) -> Any:
    """A floating-point tensor with every element moved by one unit in the last place; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.dtype not in WIDE:
        return value
    signs = torch.randint(0, 2, value.shape, generator=noise, dtype=torch.int8) * 2 - 1
    return value * (1 + signs.to(value.dtype) * torch.finfo(value.dtype).eps)


def _followed(node: Node, mine: Any, theirs: Any) -> Any:
    """A result of the float64 run: integers become those of the float32 run, floats become float64."""
    if isinstance(mine, list | tuple):
        return type(mine)(_followed(node, m, t) for m, t in zip(mine, theirs, strict=True))
    if not isinstance(mine, torch.Tensor):
        return theirs
    if mine.shape != theirs.shape:
        raise NoWideRunError(f"{node.target} reads memory as another dtype")
    if theirs.dtype not in WIDE:
        return theirs
    return mine if mine.dtype == WIDE[theirs.dtype] else mine.to(WIDE[theirs.dtype])


def _is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)
