"""A child process that is stopped (background.py stops compilers) cannot see that its parent has been killed.

A guard sees it for the child: a small process beside it, in a group of its own, that waits for either one to end.
The kernel's parent-death signal would not do: it comes when the *thread* that started the child ends, and does not
reach the compilers that the child has started. Imports no torch: the guard is a copy of the child as it is now.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

GRACE_S = 3.0
"""From the polite signal to the other one: a builder ends its compiler and removes what it wrote."""

POLL_S = 0.5


def stand_guard(parent: int) -> None:
    """From now on this process's group ends when `parent` ends, stopped or not.

    Call it early: before this process has threads, or is large.
    """
    child = os.getpid()
    watched = _descriptors(parent, child)
    if os.getppid() == parent and os.fork() == 0:
        with contextlib.suppress(BaseException):
            _guard(parent, child, watched)
        os._exit(0)
    for descriptor in watched:
        os.close(descriptor)


def _descriptors(parent: int, child: int) -> list[int]:
    """One for each process, readable once it has ended; [] on a kernel that has none (before 5.3, some sandboxes)."""
    try:
        return [os.pidfd_open(process) for process in (parent, child)]
    except (OSError, AttributeError):
        return []


def _guard(parent: int, child: int, watched: list[int]) -> None:
    os.setpgid(0, 0)  # what stops the child must not stop us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _let_go_of_pipes()
    if watched:
        select.select(watched, [], [])
    else:
        while _lives(parent) and os.getppid() == child:
            time.sleep(POLL_S)
    if _ended(parent, watched[:1]):
        _end_group(child, watched[1:])


def _let_go_of_pipes() -> None:
    """Whoever reads what the child prints waits until nobody holds the other end."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _end_group(child: int, watched: list[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process takes the first one once it goes on
        _signal(child, number)
    deadline_s = time.monotonic() + GRACE_S
    while not _ended(child, watched) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    _signal(child, signal.SIGKILL)  # what is left of the group


def _ended(process: int, watched: list[int]) -> bool:
    return bool(select.select(watched, [], [], 0)[0]) if watched else not _lives(process)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, number)
