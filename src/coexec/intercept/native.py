"""The loaded native core of this process, or the reason why there is none yet."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from types import ModuleType
from typing import Any

import torch

from coexec.errors import CoexecError, MachineError, UnsupportedTorchError
from coexec.intercept import reads
from coexec.intercept.after_failure import forget_gradients
from coexec.intercept.background import pacer
from coexec.intercept.build import BuildState, load, native_path_if_ready, start_background_build
from coexec.intercept.kernel_warnings import issue_warning
from coexec.intercept.wrappers import SUPPORTED_TORCH, supported_torch

_lock = threading.Lock()
_module: ModuleType | None = None
_error: CoexecError | None = None
_steps: weakref.WeakSet[Any] = weakref.WeakSet()


def native_if_ready() -> ModuleType | None:
    """Returns the native core, or None while it is being built or if it cannot be had (see `native_error`).

    Never blocks: the first call starts the build in a child process.
    """
    if _module is not None or _error is not None:
        return _module
    with _lock:
        _load_once()
    return _module


def loaded_core() -> ModuleType:
    """Returns the native core where it must be there: a step that has a plan runs in it."""
    module = native_if_ready()
    assert module is not None
    return module


def _load_once() -> None:
    """Under the lock: another thread may have been here first.

    A mistake of the user's (a variable without meaning) is raised, and does not decide for the rest of the process.
    """
    global _module, _error
    if _module is None and _error is None:
        try:
            _module = _load_or_start()
        except MachineError as error:
            _error = error


def wait_for_native(timeout_s: float) -> bool:
    """Blocks until the native core is loaded. False after `timeout_s`, or if it cannot be had."""
    deadline_s = time.monotonic() + timeout_s
    while native_if_ready() is None:
        if _error is not None or time.monotonic() > deadline_s:
            return False
        pacer.full_speed()
        time.sleep(0.05)
    return True


def native_error() -> CoexecError | None:
    """Returns why there will be no native core in this process, if that is so."""
    return _error


def _load_or_start() -> ModuleType | None:
    if not supported_torch():
        raise UnsupportedTorchError(
            f"coexec's co-execution is tested with torch {', '.join(SUPPORTED_TORCH)}; this is torch "
            f"{torch.__version__}. Steps run as plain eager PyTorch."
        )
    path = native_path_if_ready()
    if path is None:
        handle = start_background_build()
        state = handle.poll()
        if state is BuildState.FAILED and handle.error is not None:
            raise handle.error
        if state is not BuildState.READY or handle.path is None:
            return None
        path = handle.path
    module = load(path)
    reads.connect(module)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    atexit.register(_stop_all)
    return module


def new_step(native: ModuleType) -> Any:
    """Returns a native Step whose thread ends with the interpreter."""
    step = native.Step()
    step.set_upcalls(issue_warning, functools.partial(forget_gradients, native.never_computed))
    _steps.add(step)
    return step


def _before_fork() -> None:
    """The child sees memory as eager would have left it: everything validated so far is computed first."""
    if _module is None:
        return
    _module.settle_overlaps(raise_error=False)  # an error here would be printed and forgotten: the next op raises it
    step = _module.active_step()
    if step is not None:
        step.drain()


def _after_fork_in_child() -> None:
    """Only the forking thread exists here: the graph threads do not."""
    if _module is None:
        return
    step = _module.active_step()
    if step is not None:
        step.abandon()
    for other in list(_steps):
        other.forget_thread()


def _stop_all() -> None:
    """Nothing is left undone, and no error unseen: it is shown as eager's, which nobody would have caught."""
    for step in list(_steps):
        try:
            step.complete()
        except BaseException as error:
            step.name_error(error, step)
            sys.excepthook(type(error), error, error.__traceback__)
        step.stop()
