"""Tensors as the handles of AOTInductor's C interface, and calls through ctypes, which let go of the GIL."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("coexec.candidates")

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


QUICK_S = 200e-6
"""A call that is shorter may hold the GIL: other Python threads wait for longer than that for each other."""

TIMED_CALLS = 4


class Library:
    """A model container in a shared library. Its stock Python bindings hold the GIL for the whole call; this does not.

    Letting go of the GIL costs some 15 us of handles made in Python, which is more than a small graph takes. Where
    sizes are fixed and the shortest of the first calls is below `QUICK_S` the stock bindings take over, with a
    container of their own (a call that short reads a few megabytes of weights at most), and the first one is deleted.
    A library that calls custom ops needs torch's proxy executor and cannot be run this way.
    """

    def __init__(self, path: Path, n_outputs: int, *, dynamic: bool = False) -> None:
        self._path = path
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        self._n_outputs = n_outputs
        self._container = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        self._run = self._library.AOTInductorModelContainerRun
        self._delete = self._library.AOTInductorModelContainerDelete
        self._lock = threading.Lock()  # one model: the container would let a second caller wait while spinning
        _check(create(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None), "create")
        self._seconds: list[float] = []
        # A call with other sizes may take long: a dynamic library lets go of the GIL in every call.
        self._current: Callable[[list[torch.Tensor]], list[torch.Tensor]] = (
            self._without_gil if dynamic else self._timed
        )

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """One call; inputs keep their owners, outputs are new tensors."""
        return self._current(inputs)

    def _timed(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        start_s = time.perf_counter()
        results = self._without_gil(inputs)
        self._seconds.append(time.perf_counter() - start_s)
        if len(self._seconds) >= TIMED_CALLS and self._current == self._timed:
            self._current = self._without_gil
            if min(self._seconds) < QUICK_S:
                self._go_over_to_stock()
        return results

    def _go_over_to_stock(self) -> None:
        """The results of this call are good: what goes wrong here leaves everything as it is."""
        try:
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(self._path), 1)
        except Exception as error:
            log.info("coexec: the stock runner does not load %s: %r", self._path, error)
            return
        self._current = runner.run
        self.close()

    def close(self) -> None:
        """Delete the container; waits for a call of it that another thread is in. Later calls go to the stock one."""
        with self._lock:
            if self._container.value:
                self._delete(self._container)
                self._container = ctypes.c_void_p()

    def __del__(self) -> None:
        if hasattr(self, "_lock") and not sys.is_finalizing():  # without a lock the library was never loaded
            self.close()

    def _without_gil(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        n = len(inputs)
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        given = (ctypes.c_void_p * n)(*(_pointer_of(capsule, None) for capsule in capsules))
        returned = (ctypes.c_void_p * self._n_outputs)()
        sizes = ctypes.c_size_t(n), ctypes.c_size_t(self._n_outputs)
        with self._lock:
            if not self._container.value:  # another thread has gone over to the stock bindings just now
                return self._current(torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules))
            # Handles in `given` belong to the callee from here on.
            status = self._run(self._container, given, sizes[0], returned, sizes[1], None, None)
        _check(status, "run")
        handles: Any = [_new_capsule(pointer, None, None) for pointer in returned]
        return list(torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles))


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"AOTInductor failed to {what} (its message is on stderr)")
