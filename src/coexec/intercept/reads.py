"""Reads and writes that bypass the dispatcher: `numpy()`, `tolist()`, `data_ptr()`, pickling, RNG state ...

They are wrapped once, when the native core is loaded. Outside a step a wrapper costs one native call; inside, the step
is told first (a BARRIER op of the trace), so that memory is final before anything looks at it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

VALUE_READS = ("tolist", "__repr__", "__deepcopy__", "__reduce_ex__", "apply_", "map_", "map2_")
"""Read (or write) now, and keep no pointer to the memory."""

POINTER_READS = ("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "__dlpack__")
"""Hand the memory to code that may use it at any time while the tensor lives."""

ARRAY_READS = ("numpy", "__array__")
"""Hand the memory to a NumPy array: it is foreign for as long as an array over it lives."""

CONSTRUCTORS = ("tensor", "as_tensor", "asarray")
"""Functions of `torch` that read the tensors in a nested list through their pointers."""

POINTER_FUNCTIONS = (
    "max_pool1d", "tensor_split", "ctc_loss", "_sobol_engine_draw", "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_", "_sobol_engine_scramble_",
)  # fmt: skip
"""Functions of `torch` (and methods of Tensor) whose composite kernels read memory above the dispatcher; found by
running PyTorch's OpInfo database on values in flight."""

PROCESS_STATE = (
    "set_default_dtype", "use_deterministic_algorithms", "set_flush_denormal", "set_float32_matmul_precision",
    "set_num_threads",
)  # fmt: skip
"""Functions of `torch` that change what kernels do: ops before them run before them."""

GENERATOR_METHODS = ("manual_seed", "seed", "initial_seed", "get_state", "set_state", "clone_state")
"""Methods of `torch.Generator`, a static C type."""

RNG_FUNCTIONS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
"""Functions of `torch.random`, also reachable as `torch.<name>`."""


def install(native: ModuleType) -> None:
    """Wraps the reads for this process. Calling it again does nothing."""
    if getattr(torch.Tensor.numpy, "_coexec_wrapper", False):
        return
    for name in VALUE_READS:
        _wrap_method(name, functools.partial(_value_read, native, name))
    for name in POINTER_READS:
        _wrap_method(name, functools.partial(_pointer_read, native, name))
    for name in ARRAY_READS:
        _wrap_method(name, functools.partial(_array_read, native, name))
    for name in CONSTRUCTORS:
        setattr(torch, name, _wrap_constructor(native, getattr(torch, name), 0))
    for name in ("new_tensor", "new"):
        setattr(torch.Tensor, name, _wrap_constructor(native, getattr(torch.Tensor, name), 1))
    for name in RNG_FUNCTIONS:
        _wrap_rng(native, name)
    for name in POINTER_FUNCTIONS:
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                setattr(owner, name, _wrap_pointer_function(native, name, getattr(owner, name)))
    for name in PROCESS_STATE:
        setattr(torch, name, _rng_barrier(native, name, getattr(torch, name)))
    _wrap_generator_methods(native)
    _wrap_data(native)


def _wrap_method(name: str, read: Callable[..., Any]) -> None:
    original = getattr(torch.Tensor, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return read(original, self, *args, **kwargs)

    wrapper._coexec_wrapper = True  # type: ignore[attr-defined]
    setattr(torch.Tensor, name, wrapper)


def _value_read(native: ModuleType, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.active_step()
    if step is None or step.paused:
        return original(tensor, *args, **kwargs)
    step.barrier(name, tensor, False)
    return _paused(step, original, tensor, *args, **kwargs)


def _pointer_read(native: ModuleType, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.active_step()
    if step is None or step.paused:
        return original(tensor, *args, **kwargs)
    step.barrier(name, tensor, name not in ("storage", "_typed_storage", "untyped_storage", "data_ptr"))
    return _paused(step, original, tensor, *args, **kwargs)


def _array_read(native: ModuleType, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.active_step()
    if step is not None and not step.paused:
        step.barrier(name, tensor, False)
        array = _paused(step, original, tensor, *args, **kwargs)
    else:
        array = original(tensor, *args, **kwargs)
    _foreign_while_alive(native, tensor, array)
    return array


def _foreign_while_alive(native: ModuleType, tensor: torch.Tensor, array: Any) -> None:
    """Marks the tensor's memory as NumPy's until the array (every view of it keeps it alive) is gone."""
    if tensor.layout == torch.strided and tensor.device.type == "cpu":
        key = native.mark_foreign(tensor)
        if key:
            weakref.finalize(array, native.unmark_foreign, key).atexit = False


def _paused(step: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls library code on real values: its ops are no part of the step."""
    step.paused = True
    try:
        return function(*args, **kwargs)
    finally:
        step.paused = False


def _wrap_constructor(native: ModuleType, original: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.active_step()
        if step is not None and not step.paused:
            if position and native.has_key(args[0]):
                step.barrier("read", args[0], False)  # its constructor looks at the key set of `self`
            data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
            for tensor in _tensors_in(data) if not isinstance(data, torch.Tensor) else ():
                step.barrier("read", tensor, False)
        return original(*args, **kwargs)

    return wrapper


def _tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Tensors in a nested list or tuple; a tensor by itself is read through the dispatcher."""
    if isinstance(data, list | tuple):
        for item in data:
            if isinstance(item, torch.Tensor):
                yield item
            else:
                yield from _tensors_in(item)


def _wrap_generator_methods(native: ModuleType) -> None:
    """`torch.default_generator.manual_seed()` must find the graph's earlier draws made, and none of the later ones.

    The type is a static one, whose attributes cannot be set; its dictionary can. Python is told with PyType_Modified.
    """
    generator = torch._C.Generator
    dictionary = gc.get_referents(generator.__dict__)[0]
    for name in GENERATOR_METHODS:
        if name in dictionary:
            dictionary[name] = _rng_barrier(native, name, dictionary[name])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(generator))


def _wrap_data(native: ModuleType) -> None:
    """`p.data`, read or set, gives an ordinary tensor the key of a value that is still being computed."""
    original: Any = torch._C.TensorBase.data

    def get_data(self: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = original.__get__(self)
        step = native.active_step()
        if step is not None:
            step.key_until_left(value)
        return value

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        original.__set__(self, value)
        step = native.active_step()
        if step is not None:
            step.key_until_left(self)

    torch.Tensor.data = property(get_data, set_data, doc=original.__doc__)  # type: ignore[assignment]


def _wrap_pointer_function(native: ModuleType, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.active_step()
        if step is None or step.paused or (name == "max_pool1d" and _differentiated(*args, **kwargs)):
            return original(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            for tensor in _tensors_in([value]):
                step.barrier(name, tensor, False)
        return _paused(step, original, *args, **kwargs)

    return wrapper


def _differentiated(input: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """max_pool1d reads memory itself only where it need not be differentiated; else it is an op like others."""
    return torch.is_grad_enabled() and input.requires_grad


def _wrap_rng(native: ModuleType, name: str) -> None:
    wrapper = _rng_barrier(native, name, getattr(torch.random, name))
    for module in (torch.random, torch):
        setattr(module, name, wrapper)


def _rng_barrier(native: ModuleType, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.active_step()
        if step is None or step.paused:
            return original(*args, **kwargs)
        step.barrier(name, None, False)  # the graph has made all earlier draws, and none later
        return _paused(step, original, *args, **kwargs)

    return wrapper
