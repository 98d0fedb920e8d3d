"""The process that forks the tuner's children: `python -m coexec.tuning.nursery_main PARENT SOCKET`.

A message on the socket brings four descriptors: the child's stdin, stdout and stderr, and a pipe for its exit status.
The answer is the child's process id. Nothing here may start a thread or run a kernel: OpenMP's threads do not survive a
fork, and a copy of a process that had some hangs in its first parallel loop.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

from coexec.tuning.child_main import die_with, serve

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "coexec.backends.candidates.registry",
    "coexec.tuning.identity",
    "coexec.tuning.inputs",
    "coexec.tuning.program_file",
    "coexec.tuning.verify",
)
"""What every child needs; each takes a moment to import."""

DESCRIPTORS = 4


def main() -> None:
    """Fork whenever asked, until the tuner is gone."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    connection = socket.socket(fileno=descriptor)
    for name in PRELOADED:
        importlib.import_module(name)
    nursery = _Nursery(connection)
    child = nursery.run()
    if child is not None:
        child()


class _Nursery:
    """The forking process's state: its children and where their exit status goes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.children: dict[int, int] = {}  # process id -> descriptor for its exit status
        self.wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # select returns, by the descriptor above

    def run(self) -> Callable[[], None] | None:
        """Serve; returns what is to be done in a forked child, None in the parent when the tuner is gone."""
        while True:
            ready, _, _ = select.select([self.connection.fileno(), self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.report_ended()
            if self.connection.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self.connection, 64, DESCRIPTORS)
                if not message:
                    return None
                if (child := self.start(descriptors)) is not None:
                    return child

    def start(self, descriptors: list[int]) -> Callable[[], None] | None:
        """Fork; in the child, what it is to do."""
        nursery = os.getpid()
        pid = os.fork()
        if not pid:
            self.become_child(descriptors)
            return lambda: serve(nursery)
        # In both processes: whoever kills the group must find it as soon as the number is known.
        with contextlib.suppress(OSError):  # the child has ended already, or did it first
            os.setpgid(pid, pid)
        *pipes, status = descriptors
        for descriptor in pipes:
            os.close(descriptor)
        os.set_inheritable(status, False)
        self.children[pid] = status
        self.connection.send(str(pid).encode())
        return None

    def become_child(self, descriptors: list[int]) -> None:
        """A process group of our own, and our own pipes; the others' are closed, or their ends would go unnoticed."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, target)
        for descriptor in [*descriptors, *self.children.values(), self.wake]:
            os.close(descriptor)
        self.connection.close()

    def report_ended(self) -> None:
        """Write the exit status of every ended child to its pipe."""
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                descriptor = self.children.pop(pid)
                with contextlib.suppress(OSError):  # nobody waits for it
                    os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(descriptor)


if __name__ == "__main__":
    main()
