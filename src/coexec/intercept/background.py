"""Background compilation beside a running step: it gets slices of time between the user's steps.

On a machine whose cores the step keeps busy there is no right priority for a compiler. OpenMP's workers spin between
two parallel regions, so a compiler at idle priority gets nothing: seen, a minute's build that had not ended after five.
One at a higher priority takes a worker's core in the middle of a region, and the other workers wait for it: seen, steps
of 3 to 4 times their length with a compiler at nice 0, and 2 to 3 times where libgomp's workers were made to sleep.

So the two take turns. While a step runs, the compilers are stopped; between two steps the user's thread waits for as
long as TARGET allows, and the compilers have all cores. What a step pays is thus known beforehand, not measured after.
Where the step leaves a core free, compilers run beside it instead, for as long as it does not suffer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

TARGET = 1.3
"""How much longer the average step may take while something is compiled: a 20-step window must stay below 1.5."""

LEAST_SLICE_S = 0.005  # below that, stopping and continuing cost more than they give
MOST_SLICE_S = 1.0
CONTROL_STEPS = 20  # so many steps say whether a core is free, and whether the step suffers
FREE_CORES = 0.9  # of the machine's, that the step leaves
IDLE_S = 0.5  # no step has ended for so long (and for IDLE_STEPS times a step): nobody is disturbed
IDLE_STEPS = 5


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
        self._slicing = False  # some thread waits between two of its steps
        self._last_end_s: float | None = None  # beginning of the interval under way
        self._forget_steps()

    def admit(self, group: int) -> None:
        """Takes a process group in; it runs until the next step ends."""
        with self._lock:
            first = not self._groups
            self._groups[group] = 0.0
            if first:
                self._forget_steps()
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
                self._stopped_at_s = None

    def stopped_s(self, group: int) -> float:
        """Returns how long the group has been stopped in all: its time limits do not count that."""
        with self._lock:
            under_way_s = 0.0 if self._stopped_at_s is None else time.monotonic() - self._stopped_at_s
            return self._groups.get(group, 0.0) + (under_way_s if group in self._groups else 0.0)

    def step_ended(self) -> None:
        """Call when a step of the user's has ended: waits here while the groups have their slice, if one is due."""
        if not self._groups:
            return
        with self._lock:
            if self._slicing:
                return
            slice_s = self._due_s()
            self._slicing = slice_s > 0.0
        if self._slicing:
            self._give(slice_s)

    def full_speed(self) -> None:
        """Call while the user waits for the compilation itself: the groups run until the next step ends."""
        if self._groups:
            with self._lock:
                self._last_end_s = None
                self._run()

    def _give(self, slice_s: float) -> None:
        """The groups run for that long, and the caller does not."""
        try:
            with self._lock:
                self._run()
            time.sleep(slice_s)
        finally:  # Ctrl-C may end the sleep
            with self._lock:
                self._slicing = False
                self._stop()
                self._begin_interval()

    # ------------------------------------------------------------------------------------- under the lock from here

    def _forget_steps(self) -> None:
        self._last_end_s = None
        self._last_cpu_s = 0.0
        self._credit_s = 0.0  # that steps have earned and no slice has spent
        self._steps, self._taken_s, self._cpu_s = 0, 0.0, 0.0  # since the last look, without slices
        self._step_s = 0.0  # a step with the groups stopped
        self._beside = False  # the groups run while steps run
        self._may_run_beside = True

    def _due_s(self) -> float:
        """Takes in the step that has ended. Returns how long the groups may run before the next one."""
        known = self._last_end_s is not None
        interval_s, cpu_s = self._begin_interval()
        if known:
            self._steps, self._taken_s, self._cpu_s = self._steps + 1, self._taken_s + interval_s, self._cpu_s + cpu_s
            if self._steps == CONTROL_STEPS:
                self._look()
        if self._beside:
            return 0.0
        if known:
            self._credit_s = min(MOST_SLICE_S, self._credit_s + (TARGET - 1.0) * interval_s)
        self._stop()
        if self._credit_s < LEAST_SLICE_S:
            return 0.0
        slice_s, self._credit_s = self._credit_s, 0.0
        return slice_s

    def _begin_interval(self) -> tuple[float, float]:
        """Returns the seconds, and processor seconds of this process, since the latest interval began."""
        now_s, cpu_s = time.monotonic(), time.process_time()
        passed = now_s - (self._last_end_s or now_s), cpu_s - self._last_cpu_s
        self._last_end_s, self._last_cpu_s = now_s, cpu_s
        return passed

    def _look(self) -> None:
        """Chooses between slices and running beside the steps."""
        step_s, busy_cores = self._taken_s / self._steps, self._cpu_s / self._taken_s
        self._steps, self._taken_s, self._cpu_s = 0, 0.0, 0.0
        if self._beside:
            if step_s > TARGET * self._step_s:  # it suffers after all
                self._beside = self._may_run_beside = False
        else:
            self._step_s = step_s
            self._beside = self._may_run_beside and _cores() - busy_cores > FREE_CORES
            if self._beside:
                self._run()

    def _run(self) -> None:
        if self._stopped_at_s is None:
            return
        stopped_s = time.monotonic() - self._stopped_at_s
        self._stopped_at_s = None
        for group in self._groups:
            self._groups[group] += stopped_s
            _signal(group, signal.SIGCONT)

    def _stop(self) -> None:
        if self._stopped_at_s is None and self._groups:
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


def _cores() -> int:
    with contextlib.suppress(AttributeError):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


pacer = Pacer()


def _forget_after_fork() -> None:
    """The groups are the parent's; its lock may have been held by another thread."""
    pacer.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_after_fork)
