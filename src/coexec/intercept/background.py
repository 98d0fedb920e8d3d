"""Background compilation beside a running step: it gets whole steps of the user's, as many as the user can spare.

On a machine whose cores the step keeps busy there is no right priority for a compiler. OpenMP's workers spin between
two parallel regions, so a compiler at idle priority gets nothing: seen, a minute's build that had not ended after five.
One at a higher priority takes a worker's core in the middle of a region, and the other workers wait for it: seen, steps
of 3 to 4 times their length with a compiler at nice 0.

So steps take turns. In most of them the compiler is stopped. In the others it runs, and the step makes room for it: a
second OpenMP pool makes libgomp's workers sleep between regions instead of spinning. Seen on two cores, such a step
takes 1.8 times (a transformer) to 2.9 times (a small convolutional net) as long, and the compiler gets nearly a core.
How long steps take is measured all the time, and the share of such steps is what TARGET allows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time

import torch

TARGET = 1.3
"""How much longer the average step may take while something is compiled: a 20-step window must stay below 1.5."""

FIRST_SHARE = 0.2  # of the steps, to begin with
LEAST_SHARE, MOST_SHARE = 0.05, 1.0
CONTROL_STEPS = 20  # the share follows what so many steps took on average
QUIET_STEPS = 8  # undisturbed ones in a row, which say how long a step takes without us; the first two are not counted
QUIET_EVERY = 200  # steps: the program may be another by then
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
        self._last_end_s: float | None = None
        self._quiet: list[float] = []  # seconds from one step's end to the next one's, of the quiet steps under way
        self._paced: list[float] = []  # the same since the share was last adapted
        self._quiet_left = QUIET_STEPS
        self._until_quiet = QUIET_EVERY
        self._step_s = 0.0  # an undisturbed step
        self.share = FIRST_SHARE  # of the steps, that the compiler gets
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
                self._note(now_s - self._last_end_s)
            self._last_end_s = now_s
            if self._quiet_left > 0:
                return self._stop()
            self._credit += self.share
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

    # ------------------------------------------------------------------------------------- under the lock from here

    def _note(self, interval_s: float) -> None:
        """Takes in what a step took, and adapts the share."""
        if self._quiet_left > 0:
            self._quiet.append(interval_s)
            self._quiet_left -= 1
            if self._quiet_left == 0:
                self._step_s = statistics.median(self._quiet[2:])
                self._quiet.clear()
            return
        self._paced.append(interval_s)
        if len(self._paced) == CONTROL_STEPS:
            self._adapt(statistics.fmean(self._paced) / self._step_s)
            self._paced.clear()
        self._until_quiet -= 1
        if self._until_quiet == 0:
            self._quiet_left, self._until_quiet = QUIET_STEPS, QUIET_EVERY

    def _adapt(self, factor: float) -> None:
        """`factor`: how much longer steps took than undisturbed ones, about in proportion to the share."""
        wanted = (TARGET - 1.0) / max(factor - 1.0, 1e-3)
        self.share = min(MOST_SHARE, max(LEAST_SHARE, self.share * min(1.5, max(0.5, wanted))))

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
                if time.monotonic() - self._last_end_s > max(IDLE_S, IDLE_STEPS * self._step_s):
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
