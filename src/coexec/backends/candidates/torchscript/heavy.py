"""Traces the core with its weights as attributes, and stores the trace without their values.

A stored trace is a torch.jit archive: code in TorchScript's own language and tensors, read by torch's C++ reader, which
runs no Python and knows no Python classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Core, split
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.program import Program

FILE = "graph.pt"


class _Bound(torch.nn.Module):
    """The core as a module of its live inputs, with the static ones as buffers w0, w1 ..."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core, self._live = core.module, core.live
        self._weights = core.static
        for position, value in core.weights().items():
            self.register_buffer(f"w{position}", value)

    def forward(self, *live: torch.Tensor) -> Any:
        values = dict(zip(self._live, live, strict=True)) | {i: getattr(self, f"w{i}") for i in self._weights}
        return tuple(self._core(*(values[i] for i in range(len(values)))))


def build(name: str, program: Program, folder: Path) -> Mapping[str, object]:
    """Trace into `folder`, and load it once: what cannot be loaded must not be published."""
    core = _core(name, program)
    traced = _trace(name, core)
    for position in core.static:
        value = core.examples[position]
        # One element, expanded: the archive then holds the shape and no values.
        setattr(traced, f"w{position}", torch.zeros((), dtype=value.dtype).expand(value.shape))
    traced.save(str(folder / FILE))
    _prove(name, folder, program)
    return {}


def load(name: str, folder: Path, program: Program) -> Runner:
    """The stored trace with the program's weights in it, prepared as candidate `name` does."""
    core = _core(name, program)
    with _quiet():
        loaded = torch.jit.load(str(folder / FILE))
        for position, value in core.weights().items():
            setattr(loaded, f"w{position}", value)
        call = PREPARE[name](loaded)
    return framed(name, core, lambda live: _sequence(call(*live)))


def _core(name: str, program: Program) -> Core:
    if program.dynamic:
        raise CandidateError(name, "a trace has its shapes burnt in; a dynamic graph needs another candidate")
    core = split(program)
    if not core.live:
        raise CandidateError(name, "the graph has no input that changes between calls")
    return core


def _trace(name: str, core: Core) -> torch.jit.ScriptModule:
    live = tuple(core.examples[i] for i in core.live)
    with _quiet(), torch.no_grad():
        try:
            return torch.jit.trace(_Bound(core).eval(), live, check_trace=False, strict=False)  # type: ignore[no-any-return]
        except Exception as error:
            raise CandidateError(name, f"torch.jit.trace: {type(error).__name__}: {error!s:.300}") from error


def _prove(name: str, folder: Path, program: Program) -> None:
    try:
        load(name, folder, program)(*program.inputs)
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(name, f"its file does not run: {type(error).__name__}: {error!s:.300}") from error


def _plain(loaded: Any) -> Callable[..., Any]:
    return loaded.eval()  # type: ignore[no-any-return]


def _optimized(loaded: Any) -> Callable[..., Any]:
    # oneDNN Graph fusion is a switch of the process that makes the passes below fail, and small nets four times slower.
    if torch.jit.onednn_fusion_enabled():
        raise CandidateError("optimize-for-inference", "torch.jit.enable_onednn_fusion is on; switch it off")
    with torch.no_grad():
        return torch.jit.optimize_for_inference(torch.jit.freeze(loaded.eval()))


def _frozen(loaded: Any) -> Callable[..., Any]:
    with torch.no_grad():
        return torch.jit.freeze(loaded.eval())  # type: ignore[no-any-return]


def _static_runtime(loaded: Any) -> Callable[..., Any]:
    if not hasattr(torch._C, "_jit_to_static_module"):
        raise CandidateError("static-runtime", "this torch was built without the Static Runtime")
    with torch.no_grad():
        module = torch._C._jit_to_static_module(torch.jit.freeze(loaded.eval())._c)
    return lambda *live: [_ordinary(result) for result in _sequence(module(*live))]


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. The Static Runtime computes in inference mode, and autograd takes none of its tensors."""
    if not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    memory = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


PREPARE = {
    "torchscript": _plain,
    "optimize-for-inference": _optimized,
    "static-runtime": _static_runtime,
    "ipex": _frozen,
}
"""What each candidate does with a loaded trace that has its weights."""


def _sequence(results: Any) -> Any:
    return results if isinstance(results, list | tuple) else (results,)


def _quiet() -> Any:
    """TorchScript announces its own end at every call."""
    return warnings.catch_warnings(action="ignore")
