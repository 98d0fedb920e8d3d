"""Inductor's ordinary output (Python or C++ wrapper, C++ kernels), stored as the wrapper's source and the libraries.

torch's own caches of such code are pickles, and asking them starts the compiler's front end. Here the kernels are
numbered in the order in which the wrapper asks for them, and the wrapper is given the stored files instead. Kernels of
the Python wrapper are called through ctypes: the stock binding holds the GIL while they compute.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Core, split
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.inductor.compiled import compile_jit, compiling
from coexec.backends.candidates.program import Program

WRAPPER = "wrapper.py"
KERNEL = "kernel{}.so"
REPLACED = {
    "AsyncCompile()": "coexec_kernels",
    "CppWrapperCodeCache.load_pybinding(": "coexec_kernels.cpp_wrapper(",
}
"""What the wrapper's source asks for, and who answers instead."""

POINTER = ctypes.c_void_p
NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "float": ctypes.c_float, "bool": ctypes.c_bool}


def build(
    name: str, program: Program, folder: Path, options: Mapping[str, Any], *, threads: int
) -> Mapping[str, object]:
    """Compile; store the wrapper and the kernels' libraries."""
    core = _core(name, program)
    with compiling(name, core, options, threads):
        output = compile_jit(core)
        source = _source(name, output)
        recorder = _Recorder(folder)
        _execute(source, recorder)
    if recorder.constants_needed(output):
        raise CandidateError(name, "the compiled graph has constants of its own, which this form cannot store")
    (folder / WRAPPER).write_text(source)
    return {"kernels": recorder.count}


def load(name: str, program: Program, folder: Path, metadata: Mapping[str, object]) -> Runner:
    """The stored wrapper over the stored kernels."""
    core = _core(name, program)
    namespace = _execute((folder / WRAPPER).read_text(), _Stored(folder))
    call = namespace.get("call")
    if call is None:
        raise CandidateError(name, "its wrapper defines no call")
    return framed(name, core, call)


def _core(name: str, program: Program) -> Core:
    core = split(program, bind_static=False)
    if not core.live:
        raise CandidateError(name, "the graph has no inputs")
    return core


def _source(name: str, output: Any) -> str:
    source = getattr(output, "source_code", None)
    if not isinstance(source, str) or not source:
        raise CandidateError(name, "this torch does not hand out the wrapper's source")
    head, _, _ = source.partition("\ndef benchmark_compiled_module(")  # and what follows it: a benchmark
    return head


def _execute(source: str, kernels: Any) -> dict[str, Any]:
    """Run the wrapper's module with `kernels` in place of the compiler."""
    for asked, answered in REPLACED.items():
        source = source.replace(asked, answered)
    namespace: dict[str, Any] = {"coexec_kernels": kernels, "__name__": "coexec_inductor_wrapper"}
    exec(compile(source, WRAPPER, "exec"), namespace)
    runner = namespace.get("runner")
    if "call" not in namespace and runner is not None:
        namespace["call"] = runner.call
    return namespace


class _Recorder:
    """Answers from the compiler's cache, and copies every kernel's library into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., Any]:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        return self._keep(CppPythonBindingsCodeCache.load_pybinding(argtypes, source))

    def cpp_wrapper(self, **given: Any) -> Callable[..., Any]:
        from torch._inductor.codecache import CppWrapperCodeCache

        return self._keep(CppWrapperCodeCache.load_pybinding(**given))

    def wait(self, namespace: dict[str, Any]) -> None:
        """Kernels are there when they are asked for."""

    def constants_needed(self, output: Any) -> bool:
        return bool(getattr(output, "constants", None))

    def _keep(self, function: Any) -> Callable[..., Any]:
        holder: Any = getattr(function, "__self__", None) or getattr(getattr(function, "func", None), "__self__", None)
        shutil.copyfile(holder.__file__, self.folder / KERNEL.format(self.count))
        self.count += 1
        return function  # type: ignore[no-any-return]


class _Stored:
    """Answers with stored libraries, in the same order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def cpp_pybinding(self, argtypes: Sequence[str], source: str) -> Callable[..., Any]:
        return _without_gil(self._next(), argtypes)

    def cpp_wrapper(self, *, num_outputs: int, **given: Any) -> Callable[..., Any]:
        return _extension_function(self._next(), "inductor_entry_cpp")

    def wait(self, namespace: dict[str, Any]) -> None:
        """Nothing is compiled."""

    def _next(self) -> Path:
        self.count += 1
        return self.folder / KERNEL.format(self.count - 1)


def _without_gil(path: Path, argtypes: Sequence[str]) -> Callable[..., None]:
    """The C function in `path`: tensors go as addresses, numbers as they are."""
    kernel = ctypes.CDLL(str(path)).kernel
    kinds = [_kind(text) for text in argtypes]
    kernel.argtypes, kernel.restype = kinds, None
    pointers = [kind is POINTER for kind in kinds]

    def call(*args: Any) -> None:
        kernel(*(a.data_ptr() if is_pointer else a for a, is_pointer in zip(args, pointers, strict=True)))

    return call


def _kind(argtype: str) -> Any:
    if "*" in argtype:
        return POINTER
    return NUMBERS[argtype.replace("const", "").strip()]


def _extension_function(path: Path, entry: str) -> Callable[..., Any]:
    """The function of an extension module, which releases the GIL itself."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location(f"coexec_{path.parent.name}.{entry}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, entry)  # type: ignore[no-any-return]
