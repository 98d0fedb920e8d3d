"""Program: what every candidate compiles. One functional aten graph, flat in and flat out, with example inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from coexec.errors import CoexecError


class ProgramError(CoexecError, ValueError):
    """A graph that is no program: not flat, not made of ops with a name, or without the inputs it needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One functional aten graph as AOTAutograd gives it (functionalized, nothing decomposed beyond its core)."""

    module: GraphModule  # placeholders in order; returns a flat tuple of tensors, numbers and None
    inputs: tuple[Any, ...]  # example inputs in placeholder order: real tensors, plain ints
    static_inputs: tuple[int, ...] = ()  # positions that serving will not change; () for training graphs
    training: bool = False  # forward or backward of a training step: gradients flow outside, never inside
    dynamic: bool = False  # sizes are symbols: one artifact serves many shapes

    def placeholders(self) -> list[Node]:
        """The inputs of the graph, in order."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    def outputs(self) -> tuple[Any, ...]:
        """What the graph returns: nodes, numbers and None, flat."""
        output = next(iter(reversed(self.module.graph.nodes)))
        returned = output.args[0]
        return tuple(returned) if isinstance(returned, list | tuple) else (returned,)

    def with_inputs(self, inputs: Sequence[Any]) -> Program:
        """The same graph with other example inputs of the same kinds."""
        return replace(self, inputs=tuple(inputs))

    def run_eagerly(self, *inputs: Any) -> tuple[Any, ...]:
        """The graph op by op, as Dynamo's "eager" backend runs it."""
        with torch.no_grad():
            returned = self.module.forward(*inputs)
        return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def check_program(program: Program) -> None:
    """The invariants of a program. ProgramError names the first one broken:

    1. as many example inputs as placeholders, each a tensor or a plain number; static positions exist;
    2. every call is an op overload, `getitem` or arithmetic on sizes (no modules, methods, higher-order ops);
    3. attributes are tensors; the output is flat.
    """
    placeholders = program.placeholders()
    if len(placeholders) != len(program.inputs):
        raise ProgramError(f"{len(program.inputs)} example inputs for a graph of {len(placeholders)} inputs")
    if any(not 0 <= position < len(placeholders) for position in program.static_inputs):
        raise ProgramError(f"static inputs {program.static_inputs} of a graph of {len(placeholders)} inputs")
    for position, value in enumerate(program.inputs):
        if not isinstance(value, torch.Tensor | int | float):
            raise ProgramError(f"input {position} is a {type(value).__name__}; a program takes tensors and numbers")
    for problem in _bad_nodes(program):
        raise ProgramError(problem)


def _bad_nodes(program: Program) -> Iterator[str]:
    for node in program.module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{node.op} {node.target!r}: functionalize the graph first (AOTAutograd)"
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            yield f"higher-order op {node.target}: programs are straight-line graphs"
        elif node.op == "get_attr" and not isinstance(attribute(program.module, node.target), torch.Tensor):
            yield f"attribute {node.target!r} is no tensor"
    if any(isinstance(value, list | tuple | dict) for value in program.outputs()):
        yield "the output is nested; a program returns a flat tuple"


def made_from(nodes: Iterable[Node]) -> set[Node]:
    """These nodes, and all that they are made from."""
    found, waiting = set[Node](), list(nodes)
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += current.all_input_nodes
    return found


def attribute(module: torch.nn.Module, path: Any) -> Any:
    """The object a `get_attr` node names. Errors: ProgramError."""
    value: Any = module
    for part in str(path).split("."):
        if not hasattr(value, part):
            raise ProgramError(f"the graph reads attribute {path!r}, which its module lacks")
        value = getattr(value, part)
    return value
