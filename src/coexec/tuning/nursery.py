"""Starts the tuner's children in milliseconds: one process imports torch once, and forks a child whenever asked.

The forking process (`nursery_main`) runs no kernel and starts no thread, so its copies begin as clean as new processes.
It ends with the tuner, and the children end with it: whatever happens to the tuner, nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO

from coexec.config import private_cache_dir

START_S = 120.0
"""Importing torch on a very busy machine."""

SLEEPING = {"OMP_WAIT_POLICY": "passive"}


class NurseryError(RuntimeError):
    """The forking process cannot be started, or did not answer."""


@dataclass(slots=True)
class Process:
    """A child's process id and pipes. It is no child of ours: its exit status comes through a pipe."""

    pid: int
    questions: IO[bytes]
    answers: IO[bytes]
    _status: IO[bytes]

    def wait(self) -> int:
        """Its exit status, as `subprocess` gives it (minus the signal's number); -9 if nobody was left to say."""
        text = self._status.read()
        return int(text) if text else -signal.SIGKILL

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.questions, self.answers, self._status):
            with contextlib.suppress(OSError):  # unsent bytes for a dead child
                pipe.close()


class Nursery:
    """The forking process, started at first use. Make it in a thread that outlives its children.

    Args:
        threads: of OpenMP in every child; it is read when the library is loaded, so it belongs to the nursery.
        beside_others: the children's idle threads sleep instead of spinning: on cores that others use, two threads
            that spin for each other take up to twenty times longer. Nothing is to be timed in such children.
    """

    def __init__(self, threads: int, *, beside_others: bool = False) -> None:
        self._threads, self._beside_others = threads, beside_others
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self, log: int) -> Process:
        """A child whose stderr is the descriptor `log`. Errors: NurseryError."""
        with self._lock:
            try:
                return self._start(log)
            except (OSError, ValueError):  # it died, perhaps by the kernel for lack of memory: once more
                self._end()
                try:
                    return self._start(log)
                except (OSError, ValueError) as error:
                    raise NurseryError(f"the tuner's children cannot be started: {error}") from error

    def close(self) -> None:
        """End the forking process, and with it all children."""
        with self._lock:
            self._end()

    def prepare(self) -> None:
        """Start the forking process now, from this thread. Errors: OSError."""
        with self._lock:
            self._connection()

    def _start(self, log: int) -> Process:
        connection = self._connection()
        theirs_in, questions = os.pipe()
        answers, theirs_out = os.pipe()
        status, theirs_status = os.pipe()
        try:
            socket.send_fds(connection, [b"start\n"], [theirs_in, theirs_out, log, theirs_status])
        finally:
            for descriptor in (theirs_in, theirs_out, theirs_status):
                os.close(descriptor)
        ours = [os.fdopen(questions, "wb", 0), os.fdopen(answers, "rb", 0), os.fdopen(status, "rb", 0)]
        try:
            pid = int(connection.recv(64))
        except (OSError, ValueError):
            for file in ours:
                file.close()
            raise
        return Process(pid, *ours)

    def _connection(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(START_S)
            command = [sys.executable, "-W", "ignore", "-m", "coexec.tuning.nursery_main"]
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(os.getpid()), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl-C is our business
                    env=child_environment(self._threads) | (SLEEPING if self._beside_others else {}),
                )
            self._socket = ours
        return self._socket

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def child_environment(threads: int) -> dict[str, str]:
    """Children find the same torch and coexec, serve with `threads`, and compile without pools of processes.

    Their caches lie in the user's private folder: Inductor's default is a shared temporary one, and what lies in it is
    loaded as native code.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(private_cache_dir("inductor")),
        "COEXEC_DISABLE": "1",
    }
