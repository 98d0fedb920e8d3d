"""The key of an FX graph (canonical text and hash), and the digest of the weights it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from coexec.subgraphs.canonical import canonical_graph
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.key import SubgraphKey, key_of_text

FORMAT = "coexec-subgraph 1"
"""First line of every text. Raise the number when the same graph gets another spelling: old entries then miss."""


@dataclass(frozen=True, slots=True)
class GraphMode:
    """The part of the caller's state that changes what a graph means without being in it."""

    grad: bool = False  # gradients will be taken through the graph
    inference: bool = False  # torch.inference_mode: outputs are inference tensors
    autocast: str = "off"  # ambient autocast as "cpu=bfloat16"; autocast inside the graph is nodes

    @classmethod
    def current(cls) -> GraphMode:
        """The mode of the calling thread."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast())

    def entries(self) -> list[str]:
        return [
            f"mode.grad: {self.grad}",
            f"mode.inference: {self.inference}",
            f"mode.autocast: {self.autocast}",
        ]


def _autocast() -> str:
    if not torch.is_autocast_enabled("cpu"):
        return "off"
    return f"cpu={str(torch.get_autocast_dtype('cpu')).removeprefix('torch.')}"


def key_of_graph(
    module: GraphModule,
    inputs: Sequence[object] | None = None,
    *,
    mode: GraphMode | None = None,
    fed: Iterable[int] = (),
    options: Mapping[str, object] | None = None,
) -> SubgraphKey:
    """Key of a functionalized aten graph (Dynamo's graphs work too, module calls included).

    `inputs`: example inputs in placeholder order, fake or real; default: the placeholders' metadata.
    `mode`: default is the calling thread's. `fed`: positions of inputs that are numbers fed anew each call.
    `options`: what else changes the result, by name (numerics, decompositions ...). Weights count by shape and dtype
    only; whatever bakes values into an artifact must publish it under :func:`constants_digest`.
    Errors: UnkeyableGraphError, which names the value without a stable identity; such a graph runs eagerly.
    """
    mode = mode or GraphMode.current()
    canonical = canonical_graph(module, inputs, with_grad=mode.grad, fed=fed)
    lines = [FORMAT, *mode.entries(), *_option_entries(options or {}), *canonical.lines]
    key = key_of_text("\n".join(lines) + "\n", canonical.ops)
    return replace(key, shape_class=canonical.shape_class, custom_ops=canonical.custom_ops)


def constants_digest(module: GraphModule, inputs: Sequence[object] | None = None) -> str:
    """SHA-256 over the values of all tensors the graph holds, "" if it holds none.

    For backends that bake weights into an artifact (freezing, constant folding): the key knows shapes only, so such an
    artifact must never serve a model with other weights. Reads every byte once: about 1 GB/s. `inputs` as for
    :func:`key_of_graph`.
    """
    tensors = canonical_graph(module, inputs, with_grad=False).constants
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if hasattr(tensor, "fake_mode") or tensor.layout is not torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__} {tensor.layout}"
        raise UnkeyableGraphError(f"cannot hash the values of a constant {kind}; pass it as an input of the graph")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def _option_entries(options: Mapping[str, object]) -> list[str]:
    return [f"option.{name}: {value!r}" for name, value in sorted(options.items())]
