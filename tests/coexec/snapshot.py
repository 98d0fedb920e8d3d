"""A deep, comparable picture of a value: two pictures are equal if no user could tell the values apart."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import torch

from coexec.intercept.native import native_if_ready

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def snapshot(value: Any) -> Any:
    """Returns nested tuples. Memory that several tensors share has one number, by first appearance."""
    return _Picture().of(value)


class _Picture:
    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # ids stay unique while the picture is taken

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, bool | int | str | bytes | torch.dtype | torch.device):
            return (type(value).__name__, value)
        if isinstance(value, float | complex):
            return (type(value).__name__, repr(value))
        if isinstance(value, np.ndarray | np.generic):
            return (type(value).__name__, str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, np.random.Generator):
            return (type(value).__name__, repr(value.bit_generator.state))
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._container(value)

    def _container(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, list | tuple):
            return (name, tuple(self.of(x) for x in value))
        if isinstance(value, set | frozenset):
            return (name, tuple(sorted(repr(x) for x in value)))
        if isinstance(value, dict):
            return (name, tuple((self._key(k), self.of(v)) for k, v in value.items()))
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
            return (name, self.of(value.state_dict()))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return (name, tuple((f.name, self.of(getattr(value, f.name))) for f in dataclasses.fields(value)))
        return (name, _ADDRESS.sub("0x", repr(value)))

    def _key(self, key: Any) -> Any:
        return self.of(key) if isinstance(key, torch.Tensor) else repr(key)

    def _module(self, module: torch.nn.Module) -> Any:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        trained = tuple((k, m.training) for k, m in module.named_modules())
        return (type(module).__name__, trained, self.of(tensors))

    def _tensor(self, t: torch.Tensor) -> Any:
        self._kept.append(t)
        native = native_if_ready()
        if native is not None and type(t) in (torch.Tensor, torch.nn.Parameter):
            assert not native.is_placeholder(t), "a placeholder outlived its step"
            assert not native.has_key(t), "a tensor outside the step carries the interceptor's key"
        kind = (type(t).__name__, str(t.dtype), str(t.layout), str(t.device), t.requires_grad, t.is_leaf)
        grad = self.of(t.grad) if t.is_leaf and t.requires_grad else None
        node = type(t.grad_fn).__name__ if t.grad_fn is not None else None
        with torch.no_grad():
            return (*kind, node, t.is_inference(), self._data(t), grad)

    def _data(self, t: torch.Tensor) -> Any:
        if t.is_nested:
            return ("nested", tuple(self._data(x) for x in t.unbind()))
        if t.layout == torch.sparse_coo:
            u = t.coalesce()
            return (tuple(t.shape), t.is_coalesced(), self._data(u.indices()), self._data(u.values()))
        if t.layout in (torch.sparse_csr, torch.sparse_csc):
            compressed = (
                (t.crow_indices(), t.col_indices())
                if t.layout == torch.sparse_csr
                else (t.ccol_indices(), t.row_indices())
            )
            return (tuple(t.shape), tuple(self._data(x) for x in compressed), self._data(t.values()))
        if t.is_quantized:
            return (tuple(t.shape), t.q_scale(), t.q_zero_point(), self._data(t.int_repr()))
        if t.device.type != "cpu":
            return (tuple(t.shape), t.stride())
        return (tuple(t.shape), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg(), self._storage(t), _bits(t))

    def _storage(self, t: torch.Tensor) -> int:
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            return -1
        return self._storages.setdefault(t.untyped_storage()._cdata, len(self._storages))


def _bits(t: torch.Tensor) -> bytes:
    plain = (
        t.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
