"""Servers and tuners on one store, and what can happen to them: tuners killed, artifacts altered, a database cut off.

Promised is: what was committed stays, no answer is wrong, no serving process ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coexec.backends.candidates import registry
from coexec.subgraphs.store import Store, open_store
from coexec.tuning.process_tree import tree
from tests.choose.decided import decide
from tests.tuning.killed import assert_gone, committed, is_alive, start, start_tuner
from tests.tuning.servers import ONCE

SIZES = 2
MODELS = len(ONCE) * SIZES
NAMES = ("planted-segfault", "planted-wrong", "torchscript", "onnxruntime")
SERVERS = """
import sys
from tests.tuning import servers
servers.main(sys.argv[1:])
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of every process of this test."""
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return open_store(strict=True)


class Tuners:
    """Two tuners; whoever ends or is killed is followed by another."""

    def __init__(self, store: Store, names: tuple[str, ...], planted: Path, seed: int) -> None:
        self.store, self.names, self.planted = store, names, planted
        self.chance = random.Random(seed)
        self.running = [self._start() for _ in range(2)]
        self.kills: Counter[str] = Counter()  # by the last stage that the tuner had told of
        self.starts = 2
        self.tried: dict[str, object] = {}
        self.ids: set[str] = set()

    def _start(self) -> subprocess.Popen[str]:
        return start_tuner(self.store, self.names, self.planted)

    def kill_one(self) -> None:
        """One of them, after a random number of its events and a random time."""
        index = self.chance.randrange(2)
        tuner = self.running[index]
        assert tuner.stdout is not None
        stage = "nothing yet"
        for _ in range(self.chance.randint(0, 6)):
            stage = tuner.stdout.readline().strip() or stage
        time.sleep(self.chance.uniform(0.0, 0.5))
        if tuner.poll() is None:
            processes = tree(tuner.pid)
            tuner.send_signal(signal.SIGKILL)
            tuner.communicate()
            self.kills[stage] += 1
            assert_gone(processes)
        self.running[index] = self._start()
        self.starts += 1
        self.check()

    def check(self) -> None:
        """Nothing that was ever seen in the store is gone or altered."""
        tried, ids = committed(self.store)
        assert {name: tried.get(name) for name in self.tried} == self.tried
        assert ids >= self.ids
        self.tried, self.ids = tried, ids

    def finish(self) -> None:
        """Both to their end; then one more, which finds nothing left to do by others."""
        for tuner in self.running:
            tuner.communicate(timeout=600)
        out, _ = self._start().communicate(timeout=600)
        assert out.splitlines()[-1] == "complete"
        self.check()


@contextmanager
def live_servers(count: int, sizes: int, stop: Path, planted: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Servers that go on until the block ends; each must then end well."""
    servers = [start(SERVERS, "live", sizes, stop, path=(planted,)) for _ in range(count)]
    try:
        yield servers
    finally:
        stop.touch()


def rounds_of(server: subprocess.Popen[str]) -> list[dict[str, int]]:
    """What a live server counted, round after round. It has ended, and nothing was wrong."""
    out, _ = server.communicate(timeout=300)
    assert server.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


def serves(counters: dict[str, int]) -> int:
    return sum(count for name, count in counters.items() if name.startswith("serve."))


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(17, 1), (17, 2), (16, 3)])
def test_fifty_kills_of_two_tuners_beside_four_servers(
    kills: int, seed: int, store: Store, tmp_path: Path, planted_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_servers(4, SIZES, tmp_path / "stop", planted_folder) as servers:
        for server in servers:  # a first round, so that all graphs are in the store
            assert server.stdout is not None
            server.stdout.readline()
        assert len(store.subgraphs()) == MODELS
        tuners = Tuners(store, NAMES, planted_folder, seed)
        while tuners.kills.total() < kills and tuners.starts < 4 * kills:
            tuners.kill_one()
            assert all(is_alive(server.pid) for server in servers)
        tuners.finish()
        time.sleep(10.0)  # another round of theirs
    assert tuners.kills.total() == kills
    rounds = [rounds_of(server) for server in servers]
    decisions = store.decisions()
    assert {decision.subgraph for decision in decisions} == {info.digest for info in store.subgraphs()}
    assert all(store.checkout(decision) is not None for decision in decisions if decision.artifacts)
    report = store.verify()
    assert report is not None
    assert report.ok, report.problems
    if any(decision.artifacts for decision in decisions):  # else every candidate was blamed for the kills
        assert all(serves(counts[-1]) > 0 for counts in rounds)
    with capsys.disabled():
        print(f"\n{kills} kills in {tuners.starts} tuners, by the last event of the killed: {dict(tuners.kills)}")
        print(f"  {len(tuners.tried)} attempts, {len(tuners.ids)} measurements kept; decided for "
              f"{dict(Counter(decision.backend for decision in decisions))}")  # fmt: skip
        print(f"  rounds of the servers: {[len(counts) for counts in rounds]}, artifacts installed: "
              f"{[serves(counts[-1]) for counts in rounds]}")  # fmt: skip


@pytest.fixture
def decided(store: Store, planted_folder: Path) -> Store:
    """Every model is in the store and decided for, by turns, for the backends that are here."""
    with fresh_server(planted_folder) as server:
        assert serves(serve(server)) == 0
    names = [n for n in ("torchscript", "onnxruntime", "openvino") if registry.get(n).availability().usable]
    for number, info in enumerate(store.subgraphs()):
        decide(store, info.digest, names[number % len(names)], threads=1)
    return store


@contextmanager
def fresh_server(planted: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that serves in a new process each time it is asked."""
    server = start(SERVERS, "fresh", SIZES, path=(planted,))  # what is registered is part of the environment
    try:
        yield server
    finally:
        server.communicate(timeout=60)
        assert server.returncode == 0


def serve(server: subprocess.Popen[str]) -> dict[str, int]:
    """One new process serves every model; what it counted."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("serve\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, "the serving process died or was wrong"
    counters: dict[str, int] = json.loads(line)
    return counters


@pytest.mark.slow
def test_a_bit_flipped_in_every_artifact_in_turn(decided: Store, planted_folder: Path) -> None:
    """Also in its checkout, which is the same file by another name. A new server serves all but what is damaged."""
    chance = random.Random(5)
    digests = {ref.digest for decision in decided.decisions() for ref in decision.artifacts}
    users = Counter(digest for d in decided.decisions() for digest in {ref.digest for ref in d.artifacts})
    assert len(digests) >= MODELS
    with fresh_server(planted_folder) as server:
        assert serves(serve(server)) == MODELS
        for digest in sorted(digests):
            path = decided.open_artifact(digest)
            assert path is not None
            content = path.read_bytes()
            path.chmod(0o600)
            altered = bytearray(content)
            altered[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(altered)
            counters = serve(server)
            assert counters["eager.artifact missing"] == users[digest]
            assert serves(counters) == MODELS - users[digest]
            assert decided.put_artifact(content) == digest
        assert serves(serve(server)) == MODELS


@pytest.mark.slow
def test_a_database_cut_off_anywhere(decided: Store, tmp_path: Path, planted_folder: Path) -> None:
    """New servers and a live one go on, with right answers; what is whole again serves again."""
    chance = random.Random(7)
    file = decided.location.sqlite_file
    assert file is not None
    decided.stats()  # the log is folded into the file
    content = file.read_bytes()
    lengths = [0, 1, 50, 99, 100, 4096, *(chance.randrange(len(content)) for _ in range(12)), len(content) - 1]
    with (
        live_servers(1, SIZES, tmp_path / "stop", planted_folder) as (live,),
        fresh_server(planted_folder) as server,
    ):
        assert live.stdout is not None
        live.stdout.readline()
        for length in lengths:
            os.truncate(file, length)
            serve(server)
            file.write_bytes(content)
            for leftover in file.parent.glob(f"{file.name}-*"):
                leftover.unlink()
        assert serves(serve(server)) == MODELS
        assert is_alive(live.pid)
    assert rounds_of(live)
