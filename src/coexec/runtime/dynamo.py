"""Living beside torch.compile: only `watch_compiled_code` imports it; else it is only met if the program did."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
# Threads with an iteration under way: the stance is the process's, the first sets it, the last restores it.
_active: list[int] = []
_stance: Any = None


class ForceEager:
    """While an iteration runs, code under torch.compile runs its own Python.

    Compiled code bypasses the dispatcher and would read placeholders as memory: silently wrong numbers.
    """

    def __init__(self, dynamo: Any) -> None:
        global _stance
        # A step called by code under torch.compile is a graph break in it; its frame hook must not see our frames.
        self._set_eval_frame = dynamo.eval_frame.set_eval_frame
        self._callback = self._set_eval_frame(None)
        self._thread = threading.get_ident()
        with _lock:
            if not _active:
                _stance = dynamo.set_stance("force_eager")
            _active.append(self._thread)

    @property
    def inside_compiled_code(self) -> bool:
        """Whether code under torch.compile made the call."""
        return self._callback is not None

    def restore(self) -> None:
        """Back to what torch.compile did before."""
        with _lock:
            _leave(self._thread)
        self._set_eval_frame(self._callback)


def _leave(thread: int) -> None:
    """Under the lock."""
    global _stance
    _active.remove(thread)
    if not _active:
        _stance.__exit__(None, None, None)
        _stance = None


def _after_fork_in_child() -> None:
    """Nobody ends the iterations of the other threads here."""
    global _lock
    _lock = threading.Lock()
    for thread in [thread for thread in _active if thread != threading.get_ident()]:
        _leave(thread)


os.register_at_fork(after_in_child=_after_fork_in_child)


def force_eager() -> ForceEager | None:
    """Returns the switch, thrown; None if the program has not loaded torch.compile."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return None
    stay_out_of_dynamo()
    return ForceEager(dynamo)


_watched = False


def watch_compiled_code(before: Callable[[], None]) -> None:
    """From now on `before()` is called whenever the process enters code under torch.compile.

    Such code bypasses the dispatcher. That it asks for its callback on entry is an internal of Dynamo.
    """
    global _watched
    if _watched:
        return
    _watched = True
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    original = eval_frame._callback_from_stance

    @functools.wraps(original)
    def callback_from_stance(callback: Any) -> Any:
        if callback is not None:  # None: the entry into code that runs as plain Python
            before()
        return original(callback)

    eval_frame._callback_from_stance = callback_from_stance


@functools.cache
def stay_out_of_dynamo() -> None:
    """Dynamo must not trace into this package."""
    sys.modules["torch._dynamo"].trace_rules.add("coexec")
