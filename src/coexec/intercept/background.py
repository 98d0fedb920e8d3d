"""Background compilation beside a running step: it gets whole steps of the user's, as many as the user can spare.

On a machine whose cores the step keeps busy there is no right priority for a compiler. OpenMP's workers spin between
two parallel regions, so a compiler at idle priority gets nothing: seen, a minute's build that had not ended after five.
One at a higher priority takes a worker's core in the middle of a region, and the other workers wait for it: seen, steps
of 3 to 4 times their length with a compiler at nice 0.

So steps take turns. In most of them the compiler is stopped. In the others it runs, and the step makes room for it: a
second OpenMP pool makes libgomp's workers sleep between regions instead of spinning. Seen on two cores, such a step
takes 1.8 times (a transformer) to 2.9 times (a small convolutional net) as long, and the compiler gets nearly a core.
How much longer is measured all the time, and the share of such steps is what TARGET allows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections import deque

import torch

TARGET = 1.35
"""How much longer the average step may take while something is compiled: a 20-step window must stay below 1.5."""

FIRST_SHARE = 0.2  # of the steps, until there are measurements
LEAST_SHARE = 0.05
MOST_SHARE = 0.9  # the other steps keep the measurement of undisturbed ones fresh
KEPT_INTERVALS = 21
ENOUGH_INTERVALS = 3
IDLE_S = 0.5  # no step has ended for so long (and for IDLE_STEPS times a step): nobody is disturbed
IDLE_STEPS = 5
LOOK_S = 0.2  # the crowd looks whether the program has ended
CROWD_ELEMENTS = 1 << 17  # enough for a parallel region: at::parallel_for splits from 32,768 elements on


def make_room(pid: int) -> None:
    """Gives a process, and what it will start, a low priority without the promise to starve."""
    with contextlib.suppress(OSError, AttributeError):  # some sandboxes forbid it
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)


class Pacer:
    """Stops and continues process groups in step with the user's steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, float] = {}  # process group -> seconds that it has been stopped
        self._stopped_at_s: float | None = None  # None: the groups run
        self._disturbed: deque[float] = deque(maxlen=KEPT_INTERVALS)  # seconds from one step's end to the next one's
        self._undisturbed: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._last_end_s: float | None = None
        self._credit = 0.0
        self._crowd = _Crowd()

    def admit(self, group: int) -> None:
        """Takes a process group in; it runs until the next step ends."""
        with self._lock:
            first = not self._groups
            self._groups[group] = 0.0
            self._last_end_s = None
            if self._stopped_at_s is not None:
                _signal(group, signal.SIGSTOP)
        if first:
            threading.Thread(target=self._watch, name="coexec-pacer", daemon=True).start()

    def dismiss(self, group: int) -> None:
        """Lets go of a group, which runs from now on (or has ended)."""
        with self._lock:
            if self._groups.pop(group, None) is not None and self._stopped_at_s is not None:
                _signal(group, signal.SIGCONT)
            if not self._groups:
                self._crowd.leave()
                self._stopped_at_s = None

    def stopped_s(self, group: int) -> float:
        """Returns how long the group has been stopped in all: its time limits do not count that."""
        with self._lock:
            under_way_s = 0.0 if self._stopped_at_s is None else time.monotonic() - self._stopped_at_s
            return self._groups.get(group, 0.0) + (under_way_s if group in self._groups else 0.0)

    def step_ended(self) -> None:
        """Call when a step of the user's has ended: measures it and decides about the next one."""
        if not self._groups:
            return
        with self._lock:
            now_s = time.monotonic()
            if self._last_end_s is not None:
                running = self._stopped_at_s is None
                (self._disturbed if running else self._undisturbed).append(now_s - self._last_end_s)
            self._last_end_s = now_s
            self._credit += self.share()
            if self._credit >= 1.0:
                self._credit -= 1.0
                self._run()
                self._crowd.come()
            else:
                self._stop()

    def full_speed(self) -> None:
        """Call while the user waits for the compilation itself: the groups run until the next step ends."""
        if self._groups:
            with self._lock:
                self._last_end_s = None
                self._crowd.leave()
                self._run()

    def share(self) -> float:
        """Returns which share of the steps the compiler gets."""
        if min(len(self._disturbed), len(self._undisturbed)) < ENOUGH_INTERVALS:
            return FIRST_SHARE
        factor = statistics.median(self._disturbed) / statistics.median(self._undisturbed)
        if factor <= TARGET:
            return MOST_SHARE
        return min(MOST_SHARE, max(LEAST_SHARE, (TARGET - 1.0) / (factor - 1.0)))

    # ------------------------------------------------------------------------------------- under the lock from here

    def _run(self) -> None:
        if self._stopped_at_s is None:
            return
        stopped_s = time.monotonic() - self._stopped_at_s
        self._stopped_at_s = None
        for group in self._groups:
            self._groups[group] += stopped_s
            _signal(group, signal.SIGCONT)

    def _stop(self) -> None:
        self._crowd.leave()
        if self._stopped_at_s is None:
            self._stopped_at_s = time.monotonic()
            for group in self._groups:
                _signal(group, signal.SIGSTOP)

    def _watch(self) -> None:
        """While no step ends (an evaluation, a pause, the program's last line), nobody is disturbed: run."""
        while self._groups:
            time.sleep(IDLE_S / 2)
            with self._lock:
                if self._last_end_s is None or self._stopped_at_s is None:
                    continue
                step_s = statistics.median(self._undisturbed) if self._undisturbed else 0.0
                if time.monotonic() - self._last_end_s > max(IDLE_S, IDLE_STEPS * step_s):
                    self._last_end_s = None  # the interval under way measures nothing
                    self._run()


class _Crowd:
    """A thread with an OpenMP pool of its own, which makes libgomp's workers sleep between regions."""

    def __init__(self) -> None:
        self._go_home: threading.Event | None = None

    def come(self) -> None:
        if self._go_home is None and torch.get_num_threads() > 1:
            self._go_home = threading.Event()
            arguments = (self._go_home,)
            threading.Thread(target=_stand_about, args=arguments, name="coexec-crowd").start()

    def leave(self) -> None:
        if self._go_home is not None:
            self._go_home.set()
            self._go_home = None


def _stand_about(go_home: threading.Event) -> None:
    # No daemon: one that is inside torch when the interpreter ends aborts the process.
    torch.zeros(CROWD_ELEMENTS).add_(1.0)  # a parallel region makes the pool; it ends with the thread
    while not go_home.wait(LOOK_S) and threading.main_thread().is_alive():
        continue


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


pacer = Pacer()


def _forget_after_fork() -> None:
    """The groups are the parent's; its lock may have been held by another thread."""
    pacer.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_after_fork)
