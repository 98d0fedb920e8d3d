"""The stored form of a program: JSON with ops by their qualified overload names. No pickle, no code, no weights.

::

    {"format": 1, "inputs": [DESCRIPTION, ...], "symbols": {"s0": [low, high | null]},
     "input_sizes": [[2, "s0"] | "s0" | null, ...],            sizes (or the number) as expressions; null: as described
     "constants": [{"dtype": "F32", "sizes": [2], "values": base64}, ...],
     "nodes": [{"op": "aten::add.Tensor", "args": [ARG, ...], "kwargs": {...}}, ...],
     "outputs": [ARG, ...], "static_inputs": [0], "training": false, "dynamic": false}

    ARG = null | bool | int | float | string | [ARG, ...]
        | {"in": input} | {"n": node} | {"k": constant}
        | {"dtype": "float32"} | {"device": "cpu"} | {"layout": "strided"} | {"memory_format": "contiguous_format"}
        | {"f": "inf" | "-inf" | "nan"} | {"re": ARG, "im": ARG}

Functions that are no ops (getitem, arithmetic on sizes) are named "operator.getitem", "math.floor", "torch.sym_max".
"""

from __future__ import annotations

import base64
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from coexec.backends.candidates.inputs import InputDescription, describe_inputs, from_json, make_inputs, to_json
from coexec.backends.candidates.program import Program, ProgramError, attribute, check_program
from coexec.backends.candidates.shapes import Sizes, annotate, read_sizes
from coexec.backends.candidates.tensor_file import CODES, DTYPES, from_raw_bytes, raw_bytes

FORMAT = 1

CONSTANT_BYTES = 16 << 20
"""A graph's own tensors beyond this total are weights, and weights are inputs."""

PLAIN_MODULES = {"operator": operator, "math": math, "torch": torch}

Json = Any


def dumps(program: Program, descriptions: Sequence[InputDescription] | None = None) -> str:
    """`program` as text; `descriptions` of its inputs (default: of the example inputs, without samples).

    Errors: ProgramError for what has no stored form.
    """
    check_program(program)
    if descriptions is None:
        descriptions = describe_inputs(program.inputs)
    writer = _Writer(program.module)
    nodes = [writer.node(node) for node in program.module.graph.nodes if node.op == "call_function"]
    sizes = read_sizes(program) if program.dynamic else Sizes({}, ())
    data = {
        "format": FORMAT,
        "inputs": [to_json(d) for d in descriptions],
        "symbols": {name: list(bounds) for name, bounds in sizes.symbols.items()},
        "input_sizes": [list(s) if isinstance(s, tuple) else s for s in sizes.inputs],
        "nodes": nodes,
        "outputs": [writer.argument(value) for value in program.outputs()],
        "constants": writer.constants,
        "static_inputs": list(program.static_inputs),
        "training": program.training,
        "dynamic": program.dynamic,
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def read_descriptions(text: str) -> tuple[InputDescription, ...]:
    """Only the descriptions of the inputs."""
    return tuple(from_json(entry) for entry in _parse(text)["inputs"])


def loads(text: str, inputs: Sequence[Any] | None = None, *, seed: int = 0) -> Program:
    """The program written in `text`, its nodes annotated (`meta["val"]`) as after tracing.

    `inputs`: its example inputs; default: made from the descriptions with `seed`.
    Errors: ProgramError names an op that this process does not know (import the package that registers it first).
    """
    data = _parse(text)
    try:
        if inputs is None:
            inputs = make_inputs([from_json(entry) for entry in data["inputs"]], seed=seed)
        module = _Reader(data).module()
        sizes = Sizes(
            {name: (low, high) for name, (low, high) in data["symbols"].items()},
            tuple(tuple(s) if isinstance(s, list) else s for s in data["input_sizes"]),
        )
        program = Program(module, tuple(inputs), tuple(data["static_inputs"]), data["training"], data["dynamic"])
    except (KeyError, TypeError, IndexError) as error:
        raise ProgramError(
            f"program text lacks or misuses {error}; see coexec/backends/candidates/program_json.py"
        ) from error
    check_program(program)
    annotate(program, sizes)
    return program


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProgramError(f"program is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ProgramError(f"program has format {found!r}, this version reads {FORMAT}; collect it again")
    return data


class _Writer:
    """Numbers nodes while writing them."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.constants: list[Json] = []
        self._constant_bytes = 0
        self._names: dict[Node, Json] = {}
        self._by_path: dict[str, Json] = {}
        self._nodes = 0
        for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
            self._names[node] = {"in": position}

    def node(self, node: Node) -> Json:
        written: dict[str, Json] = {"op": target_name(node.target), "args": [self.argument(a) for a in node.args]}
        if node.kwargs:
            written["kwargs"] = {name: self.argument(value) for name, value in node.kwargs.items()}
        self._names[node] = {"n": self._nodes}
        self._nodes += 1
        return written

    def argument(self, value: Any) -> Json:
        match value:
            case Node():
                return self._constant(value) if value.op == "get_attr" else self._names[value]
            case list() | tuple():
                return [self.argument(item) for item in value]
            case None | bool() | str() | int():
                return value
            case float():
                return value if math.isfinite(value) else {"f": repr(value)}
            case complex():
                return {"re": self.argument(value.real), "im": self.argument(value.imag)}
            case torch.device():
                return {"device": str(value)}
            case torch.dtype() | torch.layout() | torch.memory_format():
                return {type(value).__name__: str(value).removeprefix("torch.")}
        raise ProgramError(f"argument {value!r:.100} of type {type(value).__name__} has no stored form")

    def _constant(self, node: Node) -> Json:
        path = str(node.target)
        if path not in self._by_path:
            tensor = attribute(self.module, path)
            self._constant_bytes += tensor.nbytes
            if self._constant_bytes > CONSTANT_BYTES:
                raise ProgramError(
                    f"the graph holds more than {CONSTANT_BYTES} bytes of tensors; pass weights as inputs"
                )
            values = base64.b64encode(raw_bytes(tensor)).decode()
            self._by_path[path] = {"k": len(self.constants)}
            self.constants.append({"dtype": CODES[tensor.dtype], "sizes": list(tensor.shape), "values": values})
        return self._by_path[path]


class _Reader:
    """Builds the graph node by node."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.inputs = [self.graph.placeholder(f"in{position}") for position in range(len(data["inputs"]))]
        self.nodes: list[Node] = []
        self._attributes: dict[int, Node] = {}

    def module(self) -> GraphModule:
        for position, entry in enumerate(self.data["constants"]):
            self.root.register_buffer(f"constant{position}", _constant_from_json(entry))
        for entry in self.data["nodes"]:
            args = tuple(self.argument(a) for a in entry["args"])
            kwargs = {name: self.argument(value) for name, value in entry.get("kwargs", {}).items()}
            self.nodes.append(self.graph.call_function(target_of(entry["op"]), args, kwargs))
        self.graph.output(tuple(self.argument(a) for a in self.data["outputs"]))
        return GraphModule(self.root, self.graph)

    def argument(self, data: Json) -> Any:
        match data:
            case list():
                return [self.argument(item) for item in data]
            case {"in": position}:
                return self.inputs[position]
            case {"n": index}:
                return self.nodes[index]
            case {"k": index}:
                return self._attribute(index)
            case {"f": text}:
                return float(text)
            case {"re": real, "im": imaginary}:
                return complex(self.argument(real), self.argument(imaginary))
            case {"device": name}:
                return torch.device(name)
            case {"dtype": name} | {"layout": name} | {"memory_format": name}:
                return getattr(torch, name)
            case dict():
                raise ProgramError(f"argument {data!r:.100} is unknown to this version")
        return data

    def _attribute(self, index: int) -> Node:
        if index not in self._attributes:
            self._attributes[index] = self.graph.get_attr(f"constant{index}")
        return self._attributes[index]


def _constant_from_json(entry: Json) -> torch.Tensor:
    data = bytearray(base64.b64decode(entry["values"]))
    return from_raw_bytes(data, DTYPES[entry["dtype"]], entry["sizes"])


def target_name(target: Any) -> str:
    """ "aten::add.Tensor" of an overload, "operator.getitem" of a function. Errors: ProgramError."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name()).removesuffix(".default")
    for module_name, module in PLAIN_MODULES.items():
        name = getattr(target, "__name__", "")
        if getattr(module, name, None) is target:
            return f"{module_name}.{name}"
    raise ProgramError(f"{target!r:.100} has no name that another process knows")


def target_of(name: str) -> Callable[..., Any]:
    """The op or function called `name`. Errors: ProgramError. Only ops, and functions of numbers, are looked up."""
    if "::" in name:
        return _overload(name)
    module, _, function = name.partition(".")
    if name not in FUNCTIONS:
        raise ProgramError(f"{name!r} is no function that a stored program may call")
    return getattr(PLAIN_MODULES[module], function)  # type: ignore[no-any-return]


SIZE_OPERATORS = "add sub mul floordiv mod neg pow truediv eq ne lt le gt ge and_ or_"
SIZE_FUNCTIONS = "sym_max sym_min sym_float sym_int sym_ite sym_not sym_sum"
FUNCTIONS = frozenset(
    ["operator.getitem", "math.ceil", "math.floor", "math.trunc"]
    + [f"operator.{name}" for name in SIZE_OPERATORS.split()]
    + [f"torch.{name}" for name in SIZE_FUNCTIONS.split()]
)
"""What a stored program may call besides ops: a store is data, and data may not name arbitrary functions."""


def _overload(name: str) -> Callable[..., Any]:
    qualified, _, overload = name.partition(".")
    namespace, _, base = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    found = getattr(packet, overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError(f"op {name} is unknown in this process; import the package that registers it first")
    return found
