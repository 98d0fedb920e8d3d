"""Marks on disk: who works on a graph now, and which attempt was in progress when a tuner died.

A child that crashes is blamed by its tuner. What takes the tuner itself down (the machine out of memory, a driver that
resets it) is blamed by the next tuner, which finds the mark: a candidate during which tuners died often is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

DEATHS = 3
"""A kill by the user may hit the same attempt once or twice by chance."""


class Markers:
    """Marks below `folder` (private to the user)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def claimed(self, what: str) -> Iterator[bool]:
        """Whether this tuner may work on `what` now: no other live one does. The kernel drops a dead tuner's claim."""
        with (self._folder / f"{_name(what)}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Wait until no other process of this user is in `alone(what)`."""
        with (self._folder / f"{_name(what)}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def begin(self, attempt: str) -> int:
        """Mark `attempt` as in progress; return how many tuners have died during it before."""
        deaths = self._deaths(attempt)
        _write(self._mark(attempt), {"attempt": attempt, "begun": deaths + 1, "pid": os.getpid()})
        return deaths

    def finish(self, attempt: str) -> None:
        """The attempt is over, however it ended."""
        self._mark(attempt).unlink(missing_ok=True)

    def _deaths(self, attempt: str) -> int:
        try:
            return int(json.loads(self._mark(attempt).read_text())["begun"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _mark(self, attempt: str) -> Path:
        return self._folder / f"{_name(attempt)}.json"


def _name(what: str) -> str:
    return hashlib.sha256(what.encode()).hexdigest()[:32]


def _write(path: Path, content: dict[str, object]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.part")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())  # the mark is for machines that go down
    temporary.replace(path)
