"""What the kernel says about a process and everything it started: resident memory and processor time.

Address-space limits (RLIMIT_AS, RLIMIT_DATA) are no measure: runtimes reserve arenas of many gigabytes that they never
touch, and die of the limit at start. Resident memory is what hurts the machine, so that is watched.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROC = Path("/proc")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive; a compiler that a child started counts as the child's."""
    found, queue = [pid], [pid]
    while queue:
        parent = queue.pop()
        for task in _listed(PROC / str(parent) / "task"):
            children = _read(PROC / str(parent) / "task" / task / "children").split()
            found += (fresh := [int(child) for child in children])
            queue += fresh
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, or has ended."""
    state = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()[:1]
    return not state or state[0] in "TZX"


def resident_bytes(pid: int) -> int:
    """Resident memory of the tree below `pid`, in bytes. Pages shared with others count: a limit errs on their side."""
    return sum(_resident_of(process) for process in tree(pid))


def cpu_seconds(pid: int) -> float:
    """Processor time that the tree below `pid` has taken so far, ended children that were waited for included."""
    return sum(_cpu_of(process) for process in tree(pid))


def machine_busy_seconds() -> float:
    """Processor time, in seconds since boot, that the machine spent on anything but idling; 0.0 where it cannot say."""
    fields = _read(PROC / "stat").partition("\n")[0].split()
    if len(fields) < 9:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def _resident_of(pid: int) -> int:
    fields = _read(PROC / str(pid) / "statm").split()
    return int(fields[1]) * PAGE_BYTES if len(fields) > 1 else 0


def _cpu_of(pid: int) -> float:
    # The name in parentheses may hold spaces and parentheses: fields are counted from behind it.
    fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) * TICK_S if len(fields) > 14 else 0.0


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # the process is gone
        return []


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
