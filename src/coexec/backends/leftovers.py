"""Files of one process in the compile folder, named after it, so that those of a killed one can be told and removed.

live-3f9c2a-4711-0.json     live inputs of a segment; likewise spec- and job-
     |      process
     machine and process namespace: process ids mean nothing outside it
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import socket
import time
from pathlib import Path

KINDS = ("live", "spec", "job")
FOREIGN_AGE_S = 24 * 3600.0
"""Files of another machine or container that shares the folder, or of an older coexec, go when they are so old."""

_NAME = re.compile(rf"(?:{'|'.join(KINDS)})-(?:([0-9a-f]{{6}})-([0-9]+)-)?")


def own_prefix(kind: str) -> str:
    """How the names of this process's files begin; `kind` is one of KINDS."""
    return f"{kind}-{_here()}-{os.getpid()}-"


def sweep(folder: Path) -> None:
    """Removes what ended processes left behind. Whatever cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            found = _NAME.match(path.name)
            if found and _is_left_behind(path, *found.groups()):
                _remove(path)


def _is_left_behind(path: Path, machine: str | None, process: str | None) -> bool:
    if machine == _here() and process is not None:
        return not _is_alive(int(process))
    try:
        return time.time() - path.lstat().st_mtime > FOREIGN_AGE_S
    except OSError:  # somebody else has removed it
        return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's: its number was given away again, or the folder is shared
        return True
    return True


@functools.cache
def _here() -> str:
    """Six digits for this machine and process namespace."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:6]
