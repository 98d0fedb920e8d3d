"""The canonical text of an FX graph: one named entry per line, the same for every spelling of the same computation.

Entries, in order: the format, the mode, options, inputs, symbols, constants, nodes, the output. Names given by people
or by tracers (nodes, placeholders, attributes, stack traces) do not appear; defaults of an op's schema are left out,
and keyword and positional arguments read alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from coexec.subgraphs.code_hash import callable_hash, is_custom
from coexec.subgraphs.describe import (
    TRUSTED_MODULES,
    Symbols,
    callable_text,
    literal_text,
    tensor_text,
)
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.key import SEPARATOR


@dataclass(frozen=True, slots=True)
class Canonical:
    """What the walk over one graph yields."""

    lines: tuple[str, ...]  # entries "name: value"
    ops: tuple[str, ...]  # targets in order, for the outline that finds near misses
    custom_ops: tuple[str, ...]  # "namespace::name" of ops whose code the environment must hash
    shape_class: str  # size buckets of the symbols, "" for a static graph
    constants: tuple[torch.Tensor, ...]  # tensors held by the graph, in the order of their entries


def canonical_graph(
    module: GraphModule, inputs: Sequence[object] | None, *, with_grad: bool, fed: Iterable[int] = ()
) -> Canonical:
    """Walk `module`; `inputs` are its example inputs (default: the placeholders' own metadata).

    `fed`: positions of inputs that are Python numbers which change between calls. Errors: UnkeyableGraphError.
    """
    walk = _Walk(Symbols(), with_grad, frozenset(fed))
    walk.graph(module, inputs)
    lines = [*walk.inputs, *walk.symbols.entries(), *walk.constants, *walk.nodes]
    return Canonical(
        tuple(lines),
        tuple(walk.ops),
        tuple(sorted(walk.custom)),
        walk.symbols.shape_class(),
        tuple(walk.tensors),
    )


class _Walk:
    """State of one walk; nested graphs (branches of a higher-order op) are walked by children with a prefix."""

    def __init__(self, symbols: Symbols, with_grad: bool, fed: frozenset[int], prefix: str = "") -> None:
        self.symbols = symbols
        self.inputs: list[str] = []
        self.constants: list[str] = []
        self.nodes: list[str] = []
        self.ops: list[str] = []
        self.custom: set[str] = set()
        self.tensors: list[torch.Tensor] = []
        self._with_grad = with_grad
        self._fed = fed
        self._prefix = prefix
        self._names: dict[Node, str] = {}
        self._attributes: dict[int, str] = {}  # id of an attribute already listed -> its name: tied weights share one
        self._storages: dict[int, str] = {}  # storage of an input -> first input over it
        self._n_nodes = 0

    def graph(self, module: GraphModule, inputs: Sequence[object] | None) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        values = [_metadata(node) for node in placeholders] if inputs is None else list(inputs)
        if len(values) != len(placeholders):
            raise UnkeyableGraphError(f"{len(values)} example inputs for a graph of {len(placeholders)} inputs")
        for position, (node, value) in enumerate(zip(placeholders, values, strict=True)):
            self._input(position, node, value)  # in placeholder order: symbols are numbered by first appearance
        for node in module.graph.nodes:
            if node.op == "output":
                self.nodes.append(f"{self._prefix}output: {self._argument(node.args[0], uniform=True)}")
            elif node.op == "get_attr":
                self._names[node] = self._attribute(_resolve(module, node.target))
            elif node.op != "placeholder":
                self._node(module, node)

    def _input(self, position: int, node: Node, value: object) -> None:
        name = f"{self._prefix}in{position}"
        self._names[node] = name
        text = self._input_text(position, _symbolic(node, value))
        alias = self._alias(name, value) if isinstance(value, torch.Tensor) else ""
        self.inputs.append(f"{name}: {text}{alias}")

    def _input_text(self, position: int, value: object) -> str:
        if position in self._fed and not isinstance(value, torch.Tensor):
            return f"fed {type(value).__name__}"  # the value changes between calls, so it cannot be in the key
        if isinstance(value, torch.Tensor):
            fed = "fed " if position in self._fed else ""
            return fed + tensor_text(value, self.symbols, with_grad=self._with_grad)
        return literal_text(value, self.symbols)

    def _alias(self, name: str, tensor: torch.Tensor) -> str:
        """Inputs over one storage: a graph that writes one of them means something else than with apart inputs."""
        if tensor.layout is not torch.strided:
            return ""
        storage = tensor.untyped_storage()._cdata
        first = self._storages.setdefault(storage, name)
        return "" if first == name else f" aliases {first}"

    def _attribute(self, value: object) -> str:
        """Name of a get_attr constant: listed by what it looks like, once per object. Values: `constants_digest`."""
        known = self._attributes.get(id(value))
        if known is not None:
            return known
        if isinstance(value, GraphModule):
            name = f"{self._prefix}graph{len(self._attributes)}"
            self._nested(name, value)
        elif isinstance(value, torch.Tensor):
            name = f"{self._prefix}const{len(self._attributes)}"
            self.constants.append(f"{name}: {tensor_text(value, self.symbols, with_grad=self._with_grad)}")
            self.tensors.append(value)
        else:
            name = f"{self._prefix}const{len(self._attributes)}"
            self.constants.append(f"{name}: {literal_text(value, self.symbols)}")
        self._attributes[id(value)] = name
        return name

    def _nested(self, name: str, module: GraphModule) -> None:
        inner = _Walk(self.symbols, self._with_grad, frozenset(), prefix=f"{name}/")
        inner.graph(module, None)
        self.constants += [*inner.inputs, *inner.constants, *inner.nodes]
        self.ops += inner.ops
        self.custom |= inner.custom
        self.tensors += inner.tensors

    def _node(self, module: GraphModule, node: Node) -> None:
        target, extra = self._target(module, node)
        name = f"{self._prefix}%{self._n_nodes}"
        self._n_nodes += 1
        self._names[node] = name
        self.ops.append(target)
        self.nodes.append(f"{name}: " + SEPARATOR.join([target, *self._arguments(node), *extra]))

    def _target(self, module: GraphModule, node: Node) -> tuple[str, list[str]]:
        if node.op == "call_method":
            return f"method {node.target}", []
        if node.op == "call_module":
            inner = _resolve(module, node.target)
            return f"module {type(inner).__module__}.{type(inner).__qualname__}", list(self._module_entries(inner, ""))
        return self._callable(node.target), []

    def _callable(self, target: Any) -> str:
        # Also where an op is an argument: a mutating custom op is one of `auto_functionalized`.
        if isinstance(target, torch._ops.OpOverload) and is_custom(target._schema.name):
            self.custom.add(target._schema.name)
        return callable_text(target)

    def _arguments(self, node: Node) -> list[str]:
        if isinstance(node.target, torch._ops.OpOverload):
            return self._schema_arguments(node.target, node)
        positional = [f"{i}={self._argument(arg)}" for i, arg in enumerate(node.args)]
        return positional + [f"{name}={self._argument(arg)}" for name, arg in sorted(node.kwargs.items())]

    def _schema_arguments(self, op: torch._ops.OpOverload, node: Node) -> list[str]:
        given: dict[str, object] = dict(node.kwargs)
        given |= {formal.name: arg for formal, arg in zip(op._schema.arguments, node.args, strict=False)}
        texts = []
        for formal in op._schema.arguments:
            if formal.name not in given:
                continue
            text = self._argument(given[formal.name], uniform=True)
            # Compared as text: 1, 1.0 and True are equal in Python and different to a kernel.
            if not (formal.has_default_value() and text == self._argument(formal.default_value, uniform=True)):
                texts.append(f"{formal.name}={text}")
        return texts

    def _argument(self, value: object, *, uniform: bool = False) -> str:
        """`uniform`: lists and tuples mean the same (an op's schema), unlike in `x[[0, 1]]` and `x[(0, 1)]`."""
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, list | tuple):
            inner = ", ".join(self._argument(item, uniform=uniform) for item in value)
            return f"({inner})" if isinstance(value, tuple) and not uniform else f"[{inner}]"
        if isinstance(value, Mapping):
            pairs = [f"{key!r}: {self._argument(item, uniform=uniform)}" for key, item in sorted(value.items())]
            return "{" + ", ".join(pairs) + "}"
        if isinstance(value, slice):
            bounds = (self._argument(bound) for bound in (value.start, value.stop, value.step))
            return f"slice({', '.join(bounds)})"
        if isinstance(value, torch.Tensor | GraphModule):
            return self._attribute(value)
        if callable(value) and not isinstance(value, type):
            return self._callable(value)
        return literal_text(value, self.symbols)

    def _module_entries(self, module: torch.nn.Module, path: str) -> Iterable[str]:
        """Attributes of a called module: the 2021 key left these out, and convolutions of other strides collided."""
        _refuse_hooks(module)
        if type(module).__module__.split(".")[0] not in TRUSTED_MODULES:
            yield f"{path}code={callable_hash(type(module))[:16]}"
        for name, value in sorted(vars(module).items()):
            if not _is_bookkeeping(name):
                yield f"{path}{name}={self._argument(value)}"
        held = {**module._parameters, **module._buffers}
        for name, tensor in sorted(held.items()):
            yield f"{path}{name}={None if tensor is None else self._attribute(tensor)}"
        for name, child in sorted(module.named_children()):
            yield f"{path}{name}={type(child).__module__}.{type(child).__qualname__}"
            yield from self._module_entries(child, f"{path}{name}.")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOOKKEEPING = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook")


def _is_bookkeeping(name: str) -> bool:
    return name in _BOOKKEEPING or "hooks" in name


def _refuse_hooks(module: torch.nn.Module) -> None:
    for name in _HOOKS:
        if getattr(module, name, None):
            raise UnkeyableGraphError(
                f"cannot key {type(module).__qualname__}: it has {name[1:].replace('_', ' ')}, which are code of the "
                "running process; pass a functional graph (AOTAutograd's) instead"
            )


def _symbolic(node: Node, value: object) -> object:
    """The placeholder's own metadata where its sizes are symbols: Dynamo hands real tensors to a backend even then."""
    known = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) and known.layout is torch.strided:
        symbolic = any(isinstance(size, torch.SymInt) for size in (*known.shape, *known.stride()))
        return known if symbolic else value
    return value


def _metadata(node: Node) -> object:
    for field in ("val", "example_value"):
        if field in node.meta:
            return node.meta[field]
    raise UnkeyableGraphError(f"input {node.name} carries no metadata; pass the example inputs")


def _resolve(module: torch.nn.Module, path: Any) -> Any:
    value: Any = module
    for part in str(path).split("."):
        value = getattr(value, part)
    return value
