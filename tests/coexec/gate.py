"""An op of the graph that does not end before a test says so.

PyTorch's kernel of `special_airy_ai` is replaced by one that waits for an event and copies its argument. So a test
knows whether a call returned before its graph was done, without looking at a clock.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

LIMIT_S = 20.0  # a test that never opens its gate fails instead of hanging


class Gate:
    """Open at first. `gated(x)` copies `x` once the gate is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.delay_s = 0.0  # of every op, for programs that only have to be slower than Python
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is the point
            self._library.impl("special_airy_ai", self._kernel, "CPU")

    def _kernel(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay_s)
        assert self._open.wait(LIMIT_S), "the gate was never opened"
        return x.clone()

    def remove(self) -> None:
        """PyTorch's own kernel again."""
        self._library._destroy()

    def close(self) -> None:
        """From now on the op waits."""
        self._open.clear()

    def open(self) -> None:
        """The op may go on."""
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Closed within the block, open after it however it ends."""
        self.close()
        try:
            yield
        finally:
            self.open()

    def waited_for(self, action: Callable[[], Any], after_s: float = 0.05) -> tuple[Any, bool]:
        """Closed until `after_s` seconds after `action` was called.

        Returns its result, and whether it came only once the gate was open.
        """
        opener = threading.Timer(after_s, self.open)
        opener.start()
        try:
            result = action()
            return result, self._open.is_set()
        finally:
            opener.join()


def gated(x: torch.Tensor) -> torch.Tensor:
    """The op."""
    return torch.special.airy_ai(x)
