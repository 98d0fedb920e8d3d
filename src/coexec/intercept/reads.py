"""Reads and writes that bypass the dispatcher: `numpy()`, `tolist()`, `data_ptr()`, pickling, RNG state ...

They are wrapped when coexec is imported, so that a function captured after that (`from torch import tensor`) is a
wrapped one. Outside a step a wrapper costs one native call; inside, the step is told first (a BARRIER op of the trace),
so that memory is final before anything looks at it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.jit import _builtins

VALUE_READS = ("tolist", "__repr__", "__deepcopy__", "__reduce_ex__", "apply_", "map_", "map2_")
"""Read (or write) now, and keep no pointer to the memory."""

VALUE_WRITES = ("apply_", "map_", "map2_")
"""Those of them that write."""

OUTSIDE_READS = ("tolist", "__deepcopy__", "__reduce_ex__", "data_ptr", "untyped_storage", "storage", "_typed_storage")
"""Those of both kinds that another thread makes on the value as the running step has computed it so far; what is not
listed comes to an op by itself, or writes."""

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

BACKEND_FLAGS = ("_set_mkldnn_enabled", "_set_mkldnn_deterministic", "_set_onednn_allow_tf32")
"""Functions of `torch._C` that do so for `with torch.backends.mkldnn.flags(...)`."""

GENERATOR_METHODS = ("manual_seed", "seed", "initial_seed", "get_state", "set_state", "clone_state")
"""Methods of `torch.Generator`, a static C type."""

RNG_FUNCTIONS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
"""Functions of `torch.random`, also reachable as `torch.<name>`."""


class Core:
    """What the wrappers ask of the native core, and the answers until it is loaded: no step is active before."""

    def __init__(self) -> None:
        self.active_step: Callable[[], Any] = lambda: None
        self.step_reading: Callable[..., Any] = lambda tensor, writes=False: None
        self.watch_again: Callable[[], None] = lambda: None
        self.has_key: Callable[[torch.Tensor], bool] = lambda tensor: False
        self.real_value: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        self.mark_foreign: Callable[[torch.Tensor], int] | None = None
        self.unmark_foreign: Callable[[int], None] = lambda key: None
        # Arrays over tensors' memory that are older than the core, with their tensors.
        self.early: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}
        self.numbers = itertools.count()

    def connect(self, native: ModuleType) -> None:
        """The core is there: from now on it is asked, and it learns which memory is NumPy's."""
        self.active_step, self.has_key, self.real_value = native.active_step, native.has_key, native.real_value
        self.step_reading, self.watch_again = native.step_reading, native.watch_again
        self.mark_foreign, self.unmark_foreign = native.mark_foreign, native.unmark_foreign
        early, self.early = self.early, {}
        for tensor, array in early.values():
            if (t := tensor()) is not None and (a := array()) is not None:
                _foreign_while_alive(self, t, a)


_core = Core()


def connect(native: ModuleType) -> None:
    """Installs the wrappers if that has not happened, and lets them ask the native core."""
    install()
    _core.connect(native)


def install() -> None:
    """Wraps the reads for this process. Calling it again does nothing."""
    native = _core
    if getattr(torch.Tensor.numpy, "_coexec_wrapper", False):
        return
    for name in VALUE_READS:
        _wrap_method(name, functools.partial(_value_read, native, name))
    for name in POINTER_READS:
        _wrap_method(name, functools.partial(_pointer_read, native, name))
    for name in ARRAY_READS:
        _wrap_method(name, functools.partial(_array_read, native, name))
    for name in CONSTRUCTORS:
        _replace(torch, name, _wrap_constructor(native, getattr(torch, name), 0))
    for name in ("new_tensor", "new"):
        setattr(torch.Tensor, name, _wrap_constructor(native, getattr(torch.Tensor, name), 1))
    for name in RNG_FUNCTIONS:
        _wrap_rng(native, name)
    for name in POINTER_FUNCTIONS:
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                _replace(owner, name, _wrap_pointer_function(native, name, getattr(owner, name)))
    for owner, names in ((torch, PROCESS_STATE), (torch._C, BACKEND_FLAGS)):
        for name in names:
            _replace(owner, name, _rng_barrier(native, name, getattr(owner, name)))
    _wrap_generator_methods(native)
    _wrap_data(native)
    _wrap_inference_mode(native)


def _replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts the wrapper in place, and tells TorchScript, which knows functions by identity, what it stands for."""
    builtin = _builtins._find_builtin(getattr(owner, name))
    if builtin is not None:
        _builtins._register_builtin(wrapper, builtin)
    setattr(owner, name, wrapper)


def _wrap_method(name: str, read: Callable[..., Any]) -> None:
    original = getattr(torch.Tensor, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return read(original, self, *args, **kwargs)

    wrapper._coexec_wrapper = True  # type: ignore[attr-defined]
    setattr(torch.Tensor, name, wrapper)


def _value_read(native: Core, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.step_reading(tensor, writes=name in VALUE_WRITES)
    if step is None or step.paused:
        return original(_as_seen_outside(native, name, tensor), *args, **kwargs)
    step.barrier(name, tensor, False)
    return _paused(step, original, tensor, *args, **kwargs)


def _pointer_read(native: Core, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.step_reading(tensor)
    if step is None or step.paused:
        return original(_as_seen_outside(native, name, tensor), *args, **kwargs)
    step.barrier(name, tensor, name not in ("storage", "_typed_storage", "untyped_storage", "data_ptr"))
    return _paused(step, original, tensor, *args, **kwargs)


def _as_seen_outside(native: Core, name: str, tensor: Any) -> Any:
    """The tensor, or its value of this moment if a step of another thread is still computing it."""
    if name not in OUTSIDE_READS or not native.has_key(tensor) or (name == "__deepcopy__" and not tensor.is_leaf):
        return tensor
    value = native.real_value(tensor)
    if value is tensor:
        return tensor
    return value.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)


def _array_read(native: Core, name: str, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    step = native.step_reading(tensor)
    if step is not None and not step.paused:
        step.barrier(name, tensor, False)
        array = _paused(step, original, tensor, *args, **kwargs)
    else:
        array = original(tensor, *args, **kwargs)
    _foreign_while_alive(native, tensor, array)
    return array


def _foreign_while_alive(native: Core, tensor: torch.Tensor, array: Any) -> None:
    """Marks the tensor's memory as NumPy's until the array (every view of it keeps it alive) is gone."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return
    if native.mark_foreign is None:
        number = next(native.numbers)
        native.early[number] = (weakref.ref(tensor), weakref.ref(array))
        weakref.finalize(array, native.early.pop, number, None).atexit = False
    elif key := native.mark_foreign(tensor):
        weakref.finalize(array, native.unmark_foreign, key).atexit = False


def _paused(step: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls library code on real values: its ops are no part of the step."""
    step.paused = True
    try:
        return function(*args, **kwargs)
    finally:
        step.paused = False


def _wrap_constructor(native: Core, original: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.active_step()
        if step is None or not step.paused:
            if position and native.has_key(args[0]):
                _read(native, "read", args[0])  # its constructor looks at the key set of `self`
            data = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
            for tensor in _tensors_in(data) if not isinstance(data, torch.Tensor) else ():
                _read(native, "read", tensor)
        return original(*args, **kwargs)

    return wrapper


def _read(native: Core, name: str, tensor: torch.Tensor) -> None:
    step = native.step_reading(tensor, writes=False)
    if step is not None:
        step.barrier(name, tensor, False)


def _tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """Tensors in a nested list or tuple; a tensor by itself is read through the dispatcher."""
    if isinstance(data, list | tuple):
        for item in data:
            if isinstance(item, torch.Tensor):
                yield item
            else:
                yield from _tensors_in(item)


def _wrap_generator_methods(native: Core) -> None:
    """`torch.default_generator.manual_seed()` must find the graph's earlier draws made, and none of the later ones.

    The type is a static one, whose attributes cannot be set; its dictionary can. Python is told with PyType_Modified.
    """
    generator = torch._C.Generator
    dictionary = gc.get_referents(generator.__dict__)[0]
    for name in GENERATOR_METHODS:
        if name in dictionary:
            dictionary[name] = _rng_barrier(native, name, dictionary[name])
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(generator))


def _wrap_data(native: Core) -> None:
    """`p.data`, read or set, gives an ordinary tensor the key of a value that is still being computed."""
    original: Any = torch._C.TensorBase.data

    def get_data(self: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = original.__get__(self)
        step = native.active_step()
        if step is not None:
            step.key_until_left(value)
        return value

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        step = native.step_reading(value)
        original.__set__(self, value)
        if step is not None:
            step.key_until_left(self)

    torch.Tensor.data = property(get_data, set_data, doc=original.__doc__)  # type: ignore[assignment]


def _wrap_inference_mode(native: Core) -> None:
    """Its end restores the dispatch keys that the thread had at its beginning; a call may have returned early since."""
    original = torch.inference_mode.__exit__

    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> None:
        original(self, *error)
        native.watch_again()

    torch.inference_mode.__exit__ = leave  # type: ignore[method-assign]


def _wrap_pointer_function(native: Core, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.active_step()
        if step is not None and (step.paused or (name == "max_pool1d" and _differentiated(*args, **kwargs))):
            return original(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            for tensor in _tensors_in([value]):
                _read(native, name, tensor)
        return original(*args, **kwargs) if step is None else _paused(step, original, *args, **kwargs)

    return wrapper


def _differentiated(input: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """max_pool1d reads memory itself only where it need not be differentiated; else it is an op like others."""
    return torch.is_grad_enabled() and input.requires_grad


def _wrap_rng(native: Core, name: str) -> None:
    wrapper = _rng_barrier(native, name, getattr(torch.random, name))
    for module in (torch.random, torch):
        _replace(module, name, wrapper)


def _rng_barrier(native: Core, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        step = native.step_reading(None)
        if step is None or step.paused:
            return original(*args, **kwargs)
        step.barrier(name, None, False)  # the graph has made all earlier draws, and none later
        return _paused(step, original, *args, **kwargs)

    return wrapper
