"""A contender in a process of its own stands still while others have the turn."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.child import AwakeInTurn, ProcessTree


class Sleeper:
    """Stands for a child: a process that could run."""

    name = "sleeper"

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.session = self.process.pid
        self.processes = ProcessTree(self.session)
        self.seen: list[str] = []

    def run_block(self, lead_in: int, steps: int, one_by_one: bool) -> float:
        self.seen.append(settled(lambda: state_of(self.session) != "T", self.session))
        return 0.5

    def state(self) -> str:
        return state_of(self.session)


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def settled(reached: Callable[[], bool], process: int) -> str:
    """The state after a signal has arrived: a moment later than it was sent."""
    deadline_s = time.monotonic() + 10
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return state_of(process)


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    made = Sleeper()
    yield made
    made.process.kill()
    made.process.wait()


def test_it_runs_in_its_turn_only(sleeper: Any) -> None:
    with AwakeInTurn(sleeper) as contender:
        assert settled(lambda: sleeper.state() == "T", sleeper.session) == "T"
        assert contender.run_block(1, 3, True) == 0.5
        assert sleeper.seen != ["T"]
        assert settled(lambda: sleeper.state() == "T", sleeper.session) == "T"
    assert settled(lambda: sleeper.state() != "T", sleeper.session) != "T"


def test_a_child_that_died_is_no_error_here(sleeper: Any) -> None:
    with AwakeInTurn(sleeper):
        sleeper.process.kill()
        sleeper.process.wait()


def test_what_it_has_started_stands_still_too() -> None:
    """A compiler in a process group of its own ran on while others were timed. One that was stopped before stays so."""
    script = (
        "import os, signal, subprocess, sys\n"
        "own = subprocess.Popen(['sleep', '60'], process_group=0)\n"
        "paused = subprocess.Popen(['sleep', '60'], process_group=0)\n"
        "os.kill(paused.pid, signal.SIGSTOP)\n"
        "print(own.pid, paused.pid, flush=True)\n"
        "sys.stdin.read(); own.kill(); paused.kill()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as root:
        assert root.stdout is not None
        own, paused = map(int, root.stdout.readline().split())
        assert settled(lambda: state_of(paused) == "T", paused) == "T"
        processes = ProcessTree(root.pid)
        processes.stop()
        assert [settled(lambda pid=pid: state_of(pid) == "T", pid) for pid in (root.pid, own)] == ["T", "T"]  # type: ignore[misc]
        processes.go_on()
        assert "T" not in [settled(lambda pid=pid: state_of(pid) != "T", pid) for pid in (root.pid, own)]  # type: ignore[misc]
        assert state_of(paused) == "T"
        root.communicate("")
