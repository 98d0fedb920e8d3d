"""Candidates that are built and verified but not timed yet, kept on disk: preparing may run beside other work, and in
other runs than timing. What is lost here is built again.

    <folder>/<key>/files/...     the candidate's files, read-only
    <folder>/<key>/about.json    what else is known, and the files' digests
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from coexec.tuning.attempt import Prepared

FILES, ABOUT, UNFINISHED = "files", "about.json", "unfinished-"
KEPT_S = 30 * 86400.0
"""What nobody has timed for so long is swept away: the code that built it is likely another by now."""


class Shelf:
    """Prepared candidates below `folder` (private to the user: they are native code)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty folder to build in, on the same file system; what is not put away is deleted."""
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self._folder, ignore_cleanup_errors=True) as folder:
            files = Path(folder) / FILES
            files.mkdir(mode=0o700)
            yield files

    def put(self, key: str, prepared: Prepared) -> Prepared:
        """Put away what was built in a workplace: whole or not at all. Errors: OSError."""
        place = self._place(key)
        about = {
            "candidate": prepared.candidate,
            "metadata": dict(prepared.metadata),
            "build_s": prepared.build_s,
            "seen": prepared.seen,
            "files": {file.name: _digest(file) for file in prepared.folder.iterdir()},
        }
        (prepared.folder.parent / ABOUT).write_text(json.dumps(about))
        self.drop(key)
        os.rename(prepared.folder.parent, place)
        return Prepared(prepared.candidate, place / FILES, prepared.metadata, prepared.build_s, prepared.seen)

    def find(self, key: str) -> Prepared | None:
        """What was put away under `key`; None if it is not there or damaged."""
        place = self._place(key)
        try:
            about = json.loads((place / ABOUT).read_text())
            if {file.name: _digest(file) for file in (place / FILES).iterdir()} != about["files"]:
                return None
            return Prepared(
                about["candidate"], place / FILES, about["metadata"], float(about["build_s"]), about["seen"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def drop(self, key: str) -> None:
        """It has been timed, or is no good."""
        shutil.rmtree(self._place(key), ignore_errors=True)

    def sweep(self) -> None:
        """Delete what is old, and what a killed tuner left unfinished a day ago."""
        now_s = time.time()
        for entry in self._folder.iterdir():
            limit_s = 86400.0 if entry.name.startswith(UNFINISHED) else KEPT_S
            with contextlib.suppress(OSError):
                if now_s - entry.stat().st_mtime > limit_s:
                    shutil.rmtree(entry, ignore_errors=True)

    def _place(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()[:40]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
