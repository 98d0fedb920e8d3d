"""kill -9 of the tuner at random moments: nothing that was committed is lost, and the next run goes on behind it."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.store import Store
from coexec.tuning.markers import DEATHS, Markers
from coexec.tuning.process_tree import tree
from tests.tuning.graphs import climbing, key_of, store_with
from tests.tuning.killed import assert_gone, committed, start_tuner

NAMES = ("planted-slow-build", "planted-slow", "planted-refuses", "planted-fast")


def kill_at_random(store: Store, planted_folder: Path, kills: int, seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(kills):
        tuner = start_tuner(store, NAMES, planted_folder)
        before = committed(store)
        assert tuner.stdout is not None
        for _ in range(generator.randint(1, 9)):  # events: it kills in every stage
            tuner.stdout.readline()
        time.sleep(generator.uniform(0.0, 0.4))
        processes = tree(tuner.pid)
        tuner.send_signal(signal.SIGKILL)
        tuner.communicate()
        tried, ids = committed(store)
        assert {name: tried.get(name) for name in before[0]} == before[0]
        assert before[1] <= ids
        assert_gone(processes)


def finish(store: Store, planted_folder: Path) -> None:
    tuner = start_tuner(store, NAMES, planted_folder)
    out, _ = tuner.communicate(timeout=150)
    assert out.splitlines()[-1] == "complete"
    for info in store.subgraphs():
        (decision,) = store.decisions(info.digest)
        assert decision.backend in ("planted-fast", "planted-slow-build")
        assert set(decision.options["tried"]) == set(NAMES)
        assert store.checkout(decision) is not None
    report = store.verify()
    assert report is not None
    assert report.ok, report.problems


def test_three_kills_lose_nothing(tmp_path: Path, planted_folder: Path) -> None:
    store = store_with(tmp_path, climbing(32))
    kill_at_random(store, planted_folder, kills=3, seed=1)
    finish(store, planted_folder)


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path: Path, planted_folder: Path) -> None:
    store = store_with(tmp_path, *(climbing(size) for size in (16, 32, 48)))
    kill_at_random(store, planted_folder, kills=20, seed=2)
    finish(store, planted_folder)


def test_ctrl_c_ends_the_tuner_and_all_it_started(
    tmp_path: Path, planted_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_BUILD_S", "600")
    tuner = start_tuner(store_with(tmp_path, climbing(32)), ("planted-slow-build",), planted_folder)
    try:
        processes = while_it_builds(tuner)
        tuner.send_signal(signal.SIGINT)
        tuner.communicate(timeout=60)
    finally:
        tuner.kill()
        tuner.communicate()
    assert tuner.returncode not in (0, -signal.SIGKILL)
    assert_gone(processes)


def while_it_builds(tuner: subprocess.Popen[str]) -> list[int]:
    """The processes of a tuner whose only candidate is being built: itself, the nursery, and in it the child."""
    assert tuner.stdout is not None
    while tuner.stdout.readline().strip() != "build":
        assert tuner.poll() is None
    deadline_s = time.monotonic() + 60
    while len(processes := tree(tuner.pid)) < 3:
        assert time.monotonic() < deadline_s, processes
        time.sleep(0.05)
    return processes


def test_an_attempt_that_takes_tuners_down_is_left_out(tmp_path: Path) -> None:
    from coexec.tuning import tune
    from coexec.tuning.identity import environment_of

    store = store_with(tmp_path, climbing(32))
    digest, environment = key_of(climbing(32)).digest, environment_of((), 1).digest
    markers = Markers(store.location.folder / "marks")
    for deaths in range(DEATHS):
        assert markers.begin(f"{digest} {environment}  planted-fast") == deaths  # and the tuner dies
    report = tune(store, threads=1, rounds=(3, 4), busy_retries=0, candidates=("planted-fast",))
    (attempt,) = report.graphs[0].attempts
    assert attempt.outcome is Outcome.CRASH
    assert "died 3 times" in attempt.detail
    assert report.graphs[0].winner == "eager"
