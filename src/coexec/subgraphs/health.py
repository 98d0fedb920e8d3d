"""What went wrong with the store: counted by reason, said once in one line each, and not tried again too soon.

Warnings go through `logging`, never `warnings`: a user who runs with `-W error` must not get an exception out of a step
because a cache is locked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter

from coexec.subgraphs.errors import StoreError

log = logging.getLogger("coexec.subgraphs")

PAUSES = frozenset({"locked", "unreachable"})
"""Faults that cost the caller time (a lock's wait, a connection's): after one, the store is left alone for a while."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Health:
    """Counters of one store, safe to use from all threads and after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._pause_s = 0.0
        self._paused_until = 0.0

    def count(self, name: str) -> None:
        """One more `name`: "hit", "miss.unknown_graph", "fault.locked" ..."""
        with self._lock:
            self._counts[name] += 1

    def fault(self, reason: str, message: str) -> None:
        """Count a fault, warn if this reason is new, and pause after faults that cost time."""
        with self._lock:
            self._counts[f"fault.{reason}"] += 1
            new = reason not in self._warned
            self._warned.add(reason)
            if reason in PAUSES:
                self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                self._paused_until = time.monotonic() + self._pause_s
        if new:
            log.warning("coexec: subgraph store %s: %s (only speed is lost; said once)", reason, message)

    def well(self) -> None:
        """An operation succeeded: the next pause starts small again."""
        with self._lock:
            self._pause_s = 0.0

    def check_pause(self) -> None:
        """Errors: StoreError("paused") while the store is left alone."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                raise StoreError("paused", "the store did not answer a moment ago")

    def counts(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._counts)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it: here nobody would release it


_all: weakref.WeakSet[Health] = weakref.WeakSet()


def _renew_locks() -> None:
    for health in list(_all):
        health._after_fork()


os.register_at_fork(after_in_child=_renew_locks)
