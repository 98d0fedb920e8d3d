"""Under which keys the decisions about a program are kept: graph, class of sizes, weights, environment.

One graph may have two decisions at a time: the best candidate for these very weights, and the best of those whose
artifacts hold no weights, which serves every other model of the same form.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from coexec.backends import candidates
from coexec.backends.candidates import registry
from coexec.backends.candidates.program import Program, attribute
from coexec.subgraphs.code_hash import is_custom
from coexec.subgraphs.describe import TRUSTED_MODULES
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.graph_key import GraphMode, key_of_graph
from coexec.subgraphs.key import SEPARATOR, SubgraphKey, shape_class
from coexec.subgraphs.machine import current_environment, installed_backends

PLAIN_MODE = GraphMode()
"""Of a functional graph below autograd: whatever mode it was traced in is in its nodes."""


def program_key(
    module: GraphModule, inputs: Sequence[Any], *, static_inputs: Sequence[int], training: bool
) -> SubgraphKey:
    """Key of an AOTAutograd graph; `inputs` may be fake. Its class of sizes: :func:`at_sizes_of`, with real inputs.

    Errors: UnkeyableGraphError.
    """
    options = {"static": list(static_inputs), "training": training}
    return replace(key_of_graph(module, inputs, mode=PLAIN_MODE, options=options), shape_class="")


def at_sizes_of(key: SubgraphKey, inputs: Sequence[Any]) -> SubgraphKey:
    """The key at the sizes of these inputs: symbols of a dynamic graph arrive as plain numbers among its inputs."""
    return replace(key, shape_class=shape_class_of(inputs))


def shape_class_of(inputs: Sequence[Any]) -> str:
    """Buckets of the numbers among `inputs`, "" if there are none."""
    sizes = {f"in{i}": value for i, value in enumerate(inputs) if type(value) is int}
    return shape_class(sizes) if sizes else ""


def constants_digests(program: Program) -> tuple[str, str]:
    """SHA-256 of what artifacts hold: (tensors inside the graph, those and the static inputs); "" for nothing."""
    inside = inside_digest(program.module)
    static = [program.inputs[position] for position in program.static_inputs]
    return inside, baked_digest(inside, static)


def inside_digest(module: GraphModule) -> str:
    """SHA-256 of the tensors that the graph itself holds: in every artifact, and in the key by shape only."""
    names = {str(node.target): None for node in module.graph.nodes if node.op == "get_attr"}
    tensors = [value for name in names if isinstance(value := attribute(module, name), torch.Tensor)]
    return _digest(tensors) if tensors else ""


def baked_digest(inside: str, static: Sequence[Any]) -> str:
    """SHA-256 of everything that a baking candidate puts into its artifact."""
    tensors = [value for value in static if isinstance(value, torch.Tensor)]
    if not tensors:
        return inside
    return hashlib.sha256(f"{inside} {_digest(tensors)}".encode()).hexdigest()


def environment_of(custom_ops: Iterable[str], threads: int) -> Environment:
    """The environment of this process as decisions are keyed by it. Errors: UnkeyableGraphError for unknown ops."""
    return current_environment(
        threads=threads, lowering=candidates_version(), custom_ops=custom_ops, backends=_backend_versions()
    )


def custom_ops_of_text(text: str) -> tuple[str, ...]:
    """Ops of a canonical text that do not come with torch, "namespace::name"; for the environment of a stored graph."""
    targets = (line.partition(": ")[2].partition(SEPARATOR)[0] for line in text.splitlines() if line.startswith("%"))
    ops = [target.split(".") for target in targets if target.count(".") == 2]
    names = {"::".join(parts[:2]) for parts in ops if parts[0] not in TRUSTED_MODULES}
    return tuple(sorted(name for name in names if is_custom(name)))


@functools.cache
def candidates_version() -> str:
    """Digest of our code that builds and loads artifacts: a change of it makes decisions anew."""
    digest = hashlib.sha256()
    folder = Path(str(candidates.__file__)).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _backend_versions() -> dict[str, str]:
    """Versions of the known distributions, and of candidates that other packages register."""
    ours = f"{candidates.__name__}."
    others = {
        f"registered {name}": candidate.availability().version
        for name, candidate in registry.candidates().items()
        if not type(candidate).__module__.startswith(ours)
    }
    return {**installed_backends(), **others}


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of values and form; weights of one model in another layout are other weights to an artifact."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg()
        digest.update(f"{plain.dtype} {list(plain.shape)} {list(plain.stride())}".encode())
        if plain.numel():
            digest.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
