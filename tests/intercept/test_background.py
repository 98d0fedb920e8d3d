"""Pacing of background compilation: process groups are stopped and continued in step with the user's steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from coexec.intercept import background
from coexec.intercept.background import Pacer


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def pacer(monkeypatch: pytest.MonkeyPatch) -> Pacer:
    monkeypatch.setattr(background, "IDLE_S", 30.0)  # the watch has a test of its own
    return Pacer()


def state(process: subprocess.Popen[bytes]) -> str:
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return eventually(lambda: state(process) == "T")


def running(process: subprocess.Popen[bytes]) -> bool:
    return eventually(lambda: state(process) in "RS")


class Machine:
    """Steps of 10 ms that keep `busy` cores of two busy, `cost` times as long while a compiler runs beside them."""

    def __init__(self, pacer: Pacer, busy: float, cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pacer, self.busy, self.cost = pacer, busy, cost
        self.now_s = self.cpu_s = self.compiled_s = 0.0
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(background.time, "process_time", lambda: self.cpu_s)
        monkeypatch.setattr(background.time, "sleep", self.sleep)
        monkeypatch.setattr(background, "_cores", lambda: 2)
        monkeypatch.setattr(background, "_signal", lambda group, number: None)
        monkeypatch.setattr(Pacer, "_watch", lambda self: None)

    def sleep(self, seconds: float) -> None:
        assert self.pacer._stopped_at_s is None  # a slice is for the compiler
        self.now_s += seconds
        self.compiled_s += seconds

    def run(self, steps: int) -> float:
        """Returns how much longer than 10 ms the average step was, its slice counted."""
        begin_s = self.now_s
        for _ in range(steps):
            beside = self.pacer._stopped_at_s is None
            step_s = 0.010 * (self.cost if beside else 1.0)
            self.now_s += step_s
            self.cpu_s += step_s * self.busy
            self.compiled_s += step_s * beside
            self.pacer.step_ended()
        return (self.now_s - begin_s) / (0.010 * steps)


def test_steps_that_keep_all_cores_busy_pay_what_is_allowed(pacer: Pacer, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(pacer, busy=2.0, cost=3.0, monkeypatch=monkeypatch)
    pacer.admit(1 << 30)
    machine.run(2)
    windows = [machine.run(20) for _ in range(30)]
    assert min(windows) == pytest.approx(background.TARGET, rel=0.05)
    assert max(windows) == pytest.approx(background.TARGET, rel=0.05)
    assert machine.compiled_s / machine.now_s == pytest.approx(1.0 - 1.0 / background.TARGET, rel=0.1)


def test_where_a_core_is_free_compilers_run_beside_the_steps(pacer: Pacer, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(pacer, busy=1.0, cost=1.1, monkeypatch=monkeypatch)
    pacer.admit(1 << 30)
    machine.run(background.CONTROL_STEPS + 1)
    assert machine.run(100) == pytest.approx(1.1)
    assert pacer._stopped_at_s is None


def test_steps_that_suffer_from_company_get_slices(pacer: Pacer, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(pacer, busy=1.0, cost=2.0, monkeypatch=monkeypatch)
    pacer.admit(1 << 30)
    machine.run(2 * background.CONTROL_STEPS + 2)
    assert max(machine.run(20) for _ in range(10)) == pytest.approx(background.TARGET, rel=0.05)


def test_short_steps_save_up_for_a_slice(pacer: Pacer, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(pacer, busy=2.0, cost=1.0, monkeypatch=monkeypatch)
    slices: list[float] = []
    monkeypatch.setattr(background.time, "sleep", slices.append)
    pacer.admit(1 << 30)
    machine.run(100)
    assert 10 < len(slices) < 100
    assert min(slices) >= background.LEAST_SLICE_S


def test_ctrl_c_in_a_slice_leaves_the_groups_stopped(
    pacer: Pacer, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        assert pacer._stopped_at_s is None
        raise KeyboardInterrupt

    pacer.admit(sleeper.pid)
    pacer.step_ended()
    assert stopped(sleeper)
    pacer._credit_s = 1.0
    with monkeypatch.context() as context:
        context.setattr(background.time, "sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pacer.step_ended()
    assert stopped(sleeper)
    pacer.step_ended()  # and the next step is paced as ever
    assert stopped(sleeper)
    pacer.dismiss(sleeper.pid)


def test_a_group_runs_when_no_step_ends(
    pacer: Pacer, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "IDLE_S", 0.2)
    pacer.admit(sleeper.pid)
    pacer.step_ended()
    assert stopped(sleeper)
    assert running(sleeper)
    pacer.dismiss(sleeper.pid)


def test_who_waits_for_the_compiler_gets_all_of_it(pacer: Pacer, sleeper: subprocess.Popen[bytes]) -> None:
    pacer.admit(sleeper.pid)
    pacer.step_ended()
    assert stopped(sleeper)
    pacer.full_speed()
    assert running(sleeper)
    pacer.dismiss(sleeper.pid)


def test_stopped_time_is_counted(pacer: Pacer, sleeper: subprocess.Popen[bytes]) -> None:
    pacer.admit(sleeper.pid)
    pacer.step_ended()
    time.sleep(0.05)
    assert pacer.stopped_s(sleeper.pid) >= 0.05
    pacer.full_speed()
    counted_s = pacer.stopped_s(sleeper.pid)
    time.sleep(0.02)
    assert pacer.stopped_s(sleeper.pid) == counted_s
    pacer.dismiss(sleeper.pid)


def test_a_stopped_child_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from coexec.intercept.background import Pacer\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup, and the child would inherit that
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        "pacer = Pacer()\n"
        "pacer.admit(child.pid)\n"
        "pacer.step_ended()\n"
        "while ') T ' not in open(f'/proc/{child.pid}/stat').read():\n"
        "    time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    # In a session of its own, as a shell's job is: the kernel continues and hangs up stopped groups that lose it.
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: not alive(child))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
