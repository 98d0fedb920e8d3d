"""The native core on first use: is it there, build it, load it.

    path = native_path_if_ready()        # a few milliseconds; None if it has to be built
    handle = start_background_build()    # a paced child process; handle.poll() now and then
    path = build()                       # or block until it is there
    native = load(path)                  # the module coexec._native

The background build runs in a child (`python -m coexec.intercept`), so that the user's step keeps running eagerly
meanwhile. It has a low priority and a process group of its own, which is paced (background.py); Ctrl-C does not reach
it, and it ends with its parent, however the parent ends.
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from coexec.config import settings
from coexec.errors import CacheFolderError, CoexecError, NativeBuildError
from coexec.intercept import compile_core, toolchain
from coexec.intercept.background import make_room, pacer
from coexec.intercept.compile_core import SOURCES, build, load, source_key

__all__ = [
    "BuildHandle",
    "BuildState",
    "build",
    "load",
    "native_path_if_ready",
    "source_key",
    "start_background_build",
]

TERMINATE_TIMEOUT_S = 2.0
LOOK_INTERVAL_S = 1.0
_started: dict[Path, BuildHandle] = {}  # per source folder: one attempt per process, failed ones included
_started_lock = threading.Lock()


class BuildState(enum.Enum):
    """How far a background build is."""

    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


class BuildHandle:
    """One background build. `poll()` never blocks; `path` is set once READY, `error` once FAILED."""

    def __init__(self, sources: Path, process: subprocess.Popen[str] | None) -> None:
        self.path: Path | None = None
        self.error: CoexecError | None = None
        self._sources = sources
        self._process = process
        self._owner_pid = os.getpid()
        self._next_look_s = 0.0  # in a forked child: when to look for the file again
        # Also runs at interpreter exit. The handle itself is kept alive by _started.
        self._end = weakref.finalize(self, _terminate, process, self._owner_pid) if process else None

    def poll(self) -> BuildState:
        """Returns the state now."""
        if self.path is not None:
            return BuildState.READY
        if self.error is not None:
            return BuildState.FAILED
        if os.getpid() != self._owner_pid:
            return self._poll_in_forked_child()
        if self._process is None or self._process.poll() is None:
            return BuildState.RUNNING
        self._collect(self._process)
        return self.poll()

    def wait(self, timeout_s: float) -> BuildState:
        """Returns the state as soon as it is final, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.poll()) is BuildState.RUNNING and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return state

    def close(self) -> None:
        """Ends the child if it still runs; the next process starts the build again."""
        if self._end is not None:
            self._end()

    def _poll_in_forked_child(self) -> BuildState:
        # The builder is our parent's child, which only the parent can wait for; the file says when it is done.
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
            self.path = compile_core.native_path_if_ready(self._sources)
        return BuildState.READY if self.path else BuildState.RUNNING

    def _collect(self, process: subprocess.Popen[str]) -> None:
        output = process.stdout.read() if process.stdout else ""
        self.close()
        result = _parse_result(output)
        if "path" in result:
            self.path = Path(result["path"])
        elif "error" in result:
            missing, log = result.get("missing", ""), result.get("log", "")
            self.error = NativeBuildError(result["error"], missing=missing, log=log)
        else:
            self.error = NativeBuildError(
                f"The build of coexec's native core ended without a result (exit status {process.returncode}); the "
                f"next process starts it again. Until then every step runs as plain eager PyTorch. "
                f"Its last words: {output[-400:].strip()!r}"
            )


def native_path_if_ready(sources: Path = SOURCES) -> Path | None:
    """Returns the built core for exactly these sources and this Python, torch and compiler, or None.

    Takes milliseconds (it hashes the sources and asks the compiler for its version), and microseconds once this process
    has started a build.

    Raises:
        CacheFolderError: the cache folder is not private.
    """
    handle = _started.get(sources)
    if handle is None:
        return compile_core.native_path_if_ready(sources)
    handle.poll()
    return handle.path


def start_background_build(sources: Path = SOURCES) -> BuildHandle:
    """Starts the build in a child process and returns its handle, which is READY if there is nothing to do.

    One attempt per process: a later call returns the same handle, also after it failed.

    Says on stderr what is being built (COEXEC_QUIET=1 leaves that out). Never raises: a missing tool, found before
    anything starts, or an unusable cache folder is a FAILED handle whose `error` names it.
    """
    with _started_lock:
        handle = _started.get(sources)
        if handle is None:
            handle = _started[sources] = _start(sources)
        return handle


def _new_lock_after_fork() -> None:
    """Another thread may have held the lock when the process forked; nobody would release it in the child."""
    global _started_lock
    _started_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock_after_fork)


def _start(sources: Path) -> BuildHandle:
    handle = BuildHandle(sources, None)
    try:
        handle.path = compile_core.native_path_if_ready(sources)
        if handle.path is None:
            toolchain.require_compiler()
            handle = BuildHandle(sources, _spawn(sources))
    except (NativeBuildError, CacheFolderError) as error:
        handle.error = error
    except OSError as error:  # no memory or no process left, or a Python without an executable
        handle.error = NativeBuildError(f"The build of coexec's native core could not be started: {error}.")
    return handle


def _spawn(sources: Path) -> subprocess.Popen[str]:
    if not settings().quiet:
        print("coexec: building its native core in the background (once, ~1 minute) ...", file=sys.stderr, flush=True)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "coexec.intercept",
        "--sources",
        str(sources),
        "--parent",
        str(os.getpid()),
    ]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        # The child must find the same torch and the same coexec as this process did.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    make_room(child.pid)
    pacer.admit(child.pid)
    return child


def _terminate(process: subprocess.Popen[str], owner_pid: int) -> None:
    """Ends the child and reaps it; does nothing in a process that was forked from the owner."""
    if os.getpid() != owner_pid:
        return
    pacer.dismiss(process.pid)  # a stopped process would not see the signal
    if process.poll() is None:
        process.terminate()  # the child ends its compiler and removes what it wrote
        try:
            process.wait(TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout:
        process.stdout.close()


def _parse_result(output: str) -> dict[str, str]:
    """The JSON object on the last line of the child's output, or {} if it wrote none."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}
