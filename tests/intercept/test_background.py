"""Pacing of background compilation: process groups are stopped and continued in step with the user's steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
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


def settle(pacer: Pacer) -> None:
    """The quiet steps at the beginning."""
    for _ in range(background.QUIET_STEPS + 1):
        pacer.step_ended()


def test_a_group_is_stopped_in_most_steps_and_runs_in_its_share(pacer: Pacer, sleeper: subprocess.Popen[bytes]) -> None:
    pacer.admit(sleeper.pid)
    settle(pacer)
    turns = []
    for _ in range(10):
        pacer.step_ended()
        turns.append(pacer._stopped_at_s is None)
    assert sum(turns) == 2  # a fifth of the steps, until there are measurements
    while pacer._stopped_at_s is None:
        pacer.step_ended()
    assert stopped(sleeper)
    pacer.dismiss(sleeper.pid)
    assert running(sleeper)


class Machine:
    """Steps of 10 ms, and of `cost` times as much where the compiler runs."""

    def __init__(self, pacer: Pacer, cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pacer, self.cost, self.now_s = pacer, cost, 0.0
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now_s)

    def run(self, steps: int) -> float:
        """Returns how much longer than 10 ms the average step was."""
        begin_s = self.now_s
        for _ in range(steps):
            self.now_s += 0.010 * (self.cost if self.pacer._stopped_at_s is None else 1.0)
            self.pacer.step_ended()
        return (self.now_s - begin_s) / (0.010 * steps)


@pytest.mark.parametrize(("cost", "share"), [(1.0, 1.0), (1.2, 1.0), (1.6, 0.5), (4.0, 0.1)])
def test_the_share_is_what_the_target_allows(
    pacer: Pacer, monkeypatch: pytest.MonkeyPatch, cost: float, share: float
) -> None:
    monkeypatch.setattr(background, "_signal", lambda group, number: None)
    monkeypatch.setattr(pacer, "_crowd", background._Crowd())
    monkeypatch.setattr(background.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(Pacer, "_watch", lambda self: None)
    machine = Machine(pacer, cost, monkeypatch)
    pacer.admit(1 << 30)
    machine.run(300)
    assert pacer.share == pytest.approx(share, rel=0.3)
    windows = [machine.run(20) for _ in range(30)]
    assert max(windows) < 1.5
    if cost == 1.6:
        machine.cost = 2.2  # the step has become more sensitive
        machine.run(100)
        assert max(machine.run(20) for _ in range(30)) < 1.5


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


def test_the_crowd_goes_home(pacer: Pacer, sleeper: subprocess.Popen[bytes]) -> None:
    pacer.admit(sleeper.pid)
    while pacer._crowd._go_home is None:
        pacer.step_ended()
    pacer.dismiss(sleeper.pid)
    assert eventually(lambda: not any(thread.name == "coexec-crowd" for thread in threading.enumerate()))


def test_a_program_may_end_in_the_middle_of_a_disturbed_step() -> None:
    program = (
        "import subprocess, sys, torch\n"
        "from coexec.intercept.background import pacer\n"
        "torch.set_num_threads(2)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        "pacer.admit(child.pid)\n"
        "while pacer._crowd._go_home is None:\n"
        "    pacer.step_ended()\n"
        "child.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stopped_child_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from coexec.intercept.background import Pacer\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=0)\n"
        "pacer = Pacer()\n"
        "pacer.admit(child.pid)\n"
        "pacer.step_ended()\n"
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
