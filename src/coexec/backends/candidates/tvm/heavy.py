"""Converts the core to Relax, compiles it into a shared library, and runs that over torch's memory (DLPack)."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# Read once, when TVM makes its thread pool: workers that spin between calls slow torch's own threads down.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")

import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from coexec.backends.candidates.candidate import CandidateError, Runner
from coexec.backends.candidates.core import Call, Core
from coexec.backends.candidates.exported import export, foreign_core, quiet
from coexec.backends.candidates.frame import framed
from coexec.backends.candidates.program import Program

FILE = "model.so"
MAX_THREADS = 1  # `runtime.config_threadpool`'s mode: as many threads as asked for, on any core


def build(name: str, program: Program, folder: Path, *, threads: int, search_s: float) -> Mapping[str, object]:
    """Compile into `folder`; with `search_s` seconds of search before, whose records are stored as well."""
    core = foreign_core(name, program, bind_static=False)
    if core.dynamic:
        raise CandidateError(name, "schedules are for fixed shapes; a dynamic graph needs another candidate")
    module, target = converted(name, core), target_of(threads)
    set_threads(threads)
    facts: dict[str, object] = {}
    try:
        with quiet():
            if search_s > 0:
                from coexec.backends.candidates.tvm.schedules import search

                module, facts = search(name, module, target, folder, search_s)
            with target:
                executable = tvm.compile(module, target)
            executable.export_library(str(folder / FILE))
    except CandidateError:
        raise
    except Exception as error:
        raise CandidateError(name, f"{type(error).__name__}: {_last_line(error)}") from error
    return facts


def load(name: str, program: Program, folder: Path, *, threads: int) -> Runner:
    """The library's function `main`."""
    core = foreign_core(name, program, bind_static=False)
    set_threads(threads)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / FILE)), tvm.cpu())
    return framed(name, core, _call(machine), contiguous=True)


def converted(name: str, core: Core) -> Any:
    """The core as a Relax module; all inputs, weights included, are arguments of `main`.

    torch decomposes what the front end does not know. Attention stays whole: decomposed it has other strides, and torch
    itself fails on the view that follows.
    """
    exported = export(name, core)
    table = torch.export.default_decompositions()
    table.pop(torch.ops.aten.scaled_dot_product_attention.default, None)
    with torch.no_grad(), quiet():
        try:
            return from_exported_program(exported.run_decompositions(table), run_ep_decomposition=False)
        except Exception as error:
            raise CandidateError(name, f"from_exported_program: {type(error).__name__}: {_last_line(error)}") from error


def target_of(threads: int) -> Any:
    """This machine's processor, as LLVM names it."""
    cpu = str(tvm.get_global_func("target.llvm_get_system_cpu")())
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": threads})


def set_threads(threads: int) -> None:
    """Size of TVM's pool, which belongs to the process."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    tvm.get_global_func("runtime.config_threadpool")(MAX_THREADS, threads)


def _call(machine: Any) -> Call:
    lock = threading.Lock()  # a virtual machine has one stack
    main = machine["main"]

    def call(live: list[torch.Tensor]) -> list[torch.Tensor]:
        with lock:
            returned = main(*live)
        results = (returned,) if hasattr(returned, "__dlpack__") else tuple(returned)
        return [r if isinstance(r, torch.Tensor) else torch.utils.dlpack.from_dlpack(r) for r in results]

    return call


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return lines[-1][:300]
