"""All children of one tuner, so that a timing can have the machine for itself.

Workers build in parallel, but timings take turns: while one runs, the children of all other workers are stopped by a
signal and no new ones start. Tuners in other processes wait for each other through a lock file.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from coexec.tuning.child import Child
from coexec.tuning.markers import Markers
from coexec.tuning.nursery import Nursery


class Roster:
    """Starts children and knows the live ones. Safe to use from the threads of all workers."""

    def __init__(self, markers: Markers, nursery: Nursery, memory_bytes: int) -> None:
        self._markers, self._nursery, self._memory_bytes = markers, nursery, memory_bytes
        self._starting = threading.RLock()  # held during a timing: nobody starts a child then
        self._alive: set[Child] = set()

    @contextlib.contextmanager
    def child(self, name: str) -> Iterator[Child]:
        """A child for the block. Errors: NurseryError if the system starts no process."""
        with self._starting:
            child = Child(self._nursery, memory_bytes=self._memory_bytes, name=name)
            self._alive.add(child)
        try:
            yield child
        finally:
            with self._starting:
                self._alive.discard(child)
            child.end()

    @contextlib.contextmanager
    def quiet(self, *timed: Child) -> Iterator[None]:
        """No child but `timed` runs inside the block, of this tuner or of another one of this user."""
        with self._starting, self._markers.alone("timing"):
            others = self._alive - set(timed)
            for child in others:
                child.pause()
            try:
                yield
            finally:
                for child in others:
                    child.resume()

    def end_all(self) -> None:
        """Kill every child: whoever waits for one gets an error at once."""
        for child in list(self._alive):
            child.kill()
