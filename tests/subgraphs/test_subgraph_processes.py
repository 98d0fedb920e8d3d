"""Several processes on one store, some of them killed: nothing that was committed is lost, nothing half is seen."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from coexec.subgraphs.location import StoreLocation, shared_location
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring
from tests.subgraphs import children
from tests.subgraphs.samples import HERE, key, tuned

WRITE = """
folder, who, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = Store(private_location(folder), strict=True, wait_s=60.0)
for number in range(rounds):
    subgraph = key("op", scale=number)
    store.put_subgraph(subgraph, program=f"program {number}".encode())
    content = f"{who} {number} ".encode() * 1000
    refs = (publish(store, content, "model.so"), publish(store, who.encode() + b" meta", "meta.json"))
    store.decide(decision(subgraph, who, options={"who": who}, artifacts=refs), HERE)
    store.record_measurement(measurement(subgraph, who, id=f"{who}-{number}"), HERE)
    print(number, flush=True)
"""

READ = """
store = Store(private_location(Path(sys.argv[1])), wait_s=60.0)
deadline, hits = time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < deadline:
    for number in range(12):
        found = store.lookup(key("op", scale=number), HERE)
        if found is None:
            continue
        folder = store.checkout(found)
        model, meta = (folder / "model.so").read_bytes(), (folder / "meta.json").read_bytes()
        who = found.options["who"].encode()
        assert model == who + f" {number} ".encode() + model[len(who) + len(f" {number} "):]
        assert meta == who + b" meta" and found.backend.encode() == who
        hits += 1
assert not [name for name in store.counters() if name.startswith("fault")], store.counters()
print(hits)
"""


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [process.communicate(timeout=180) for process in processes]  # all end before one is judged
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in outputs]


def test_writers_and_readers_at_once_see_whole_entries_only(store: Store, location: StoreLocation) -> None:
    """pytorch#92664: two ranks wrote the library of one build beside the metadata of another."""
    store.stats()
    writers = [children.start(WRITE, location.folder, who, 12) for who in ("alpha", "beta")]
    reader = children.start(READ, location.folder, 6)
    finish(writers)
    assert int(finish([reader])[0]) > 0
    assert len(store.decisions()) == 12
    for number in range(12):
        assert len(store.measurements(key("op", scale=number).digest)) == 2
    report = store.verify()
    assert report is not None
    assert report.ok


def test_the_first_use_by_several_processes_makes_one_store(location: StoreLocation, store: Store) -> None:
    code = """
    store = Store(private_location(Path(sys.argv[1])), strict=True, wait_s=60.0)
    print(store.put_subgraph(key("op", float(sys.argv[2]))))
    """
    assert finish([children.start(code, location.folder, number) for number in range(3)]) == ["True\n"] * 3
    assert len(store.subgraphs()) == 3


@pytest.mark.slow
def test_killed_writers_lose_nothing_that_was_committed(store: Store, location: StoreLocation) -> None:
    chance = random.Random(0)
    for round_ in range(12):
        writer = children.start(WRITE, location.folder, f"w{round_}", 1000)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(chance.random() * 0.3)
        writer.send_signal(signal.SIGKILL)
        done = [0, *(int(line) for line in writer.communicate()[0].split())]
        for number in done:
            assert (
                len([m for m in store.measurements(key("op", scale=number).digest) if m.backend == f"w{round_}"]) == 1
            )
            found = store.lookup(key("op", scale=number), HERE)
            assert found is not None
            assert store.checkout(found) is not None
        report = store.verify()
        assert report is not None
        assert report.ok, report.problems
    for path in (location.folder / "incoming").iterdir():
        os.utime(path, (1, 1))
    store.prune()
    assert list((location.folder / "incoming").iterdir()) == []


def test_a_writer_killed_inside_a_transaction_leaves_the_entry_before_it(store: Store, location: StoreLocation) -> None:
    made = tuned(store, key())
    code = """
    store = Store(private_location(Path(sys.argv[1])), strict=True)
    from sqlalchemy import delete
    from coexec.subgraphs import tables
    def half(connection):
        connection.execute(delete(tables.decision))
        os.kill(os.getpid(), 9)
    store._open()[0].write(half)
    """
    child = children.start(code, location.folder)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert store.lookup(key(), HERE) == made


WIPED = """
store = Store(private_location(Path(sys.argv[1])), wait_s=5.0)
deadline = time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    for number in range(5):
        subgraph = key("op", scale=number)
        found = store.lookup(subgraph, HERE)
        if found is None:
            store.put_subgraph(subgraph)
            digest = store.put_artifact(b"code %d" % number)
            if digest:
                refs = (ArtifactRef("model.so", digest, 6),)
                store.decide(decision(subgraph, artifacts=refs), HERE)
        else:
            folder = store.checkout(found)
            try:
                content = (folder / "model.so").read_bytes() if folder else None
            except FileNotFoundError:  # wiped since the checkout: what was loaded by then would go on
                continue
            assert content in (None, b"code %d" % number)
print(json.dumps(store.counters()))
"""


def test_processes_survive_a_store_that_is_wiped_under_them(location: StoreLocation) -> None:
    """pytorch#196189, sglang#34231."""
    running = [children.start(WIPED, location.folder, 8) for _ in range(2)]
    while any(process.poll() is None for process in running):
        time.sleep(0.3)
        shutil.rmtree(location.folder, ignore_errors=True)
    for out in finish(running):
        assert json.loads(out)["hit"] > 0


TEAM = """
url, folder, who = sys.argv[1:4]
store = Store(shared_location(url, Path(folder)), strict=True, keyring=Keyring(Path(sys.argv[4])), wait_s=60.0)
for number in range(6):
    subgraph = key("op", scale=number)
    store.put_subgraph(subgraph, program=f"program {number}".encode())
    refs = (publish(store, b"same bytes from everybody" * 1000), publish(store, who.encode(), "meta.json"))
    store.decide(decision(subgraph, who, artifacts=refs), HERE)
    store.record_measurement(measurement(subgraph, who, id=f"{who}-{number}"), HERE)
    found = store.lookup(subgraph, HERE)
    assert (store.checkout(found) / "meta.json").read_bytes() == found.backend.encode()
"""


def team_works(url: str, tmp_path: Path) -> Store:
    keys = tmp_path / "keys"
    Keyring(keys).create()  # one key for the team's tuners
    finish([children.start(TEAM, url, tmp_path / who, who, keys) for who in ("alpha", "beta", "gamma")])
    store = Store(shared_location(url, tmp_path / "judge"), strict=True, keyring=Keyring(keys))
    assert len(store.decisions()) == 6
    assert sum(len(store.measurements(info.digest)) for info in store.subgraphs()) == 18
    report = store.verify()
    assert report is not None
    assert report.ok, report.problems
    return store


def test_a_team_writes_one_sqlite_file_at_once(tmp_path: Path) -> None:
    team_works(f"sqlite:///{tmp_path}/team.sqlite", tmp_path)


def test_a_team_writes_one_postgresql_database_at_once(postgresql_url: str, tmp_path: Path) -> None:
    store = team_works(postgresql_url, tmp_path)
    stats = store.stats()
    assert stats is not None
    assert stats.database_bytes is None
    assert stats.artifacts == 10
