"""Every way a store can fail costs speed only: a counted miss, one line, and the server goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coexec.subgraphs import health, migrations
from coexec.subgraphs.errors import StoreError
from coexec.subgraphs.location import StoreLocation, private_location, shared_location
from coexec.subgraphs.store import Store
from tests.subgraphs import children
from tests.subgraphs.samples import HERE, decision, key, measurement, publish, tuned


def use_everything(store: Store) -> list[object]:
    """Every call a server or a tuner makes."""
    return [
        store.lookup(key(), HERE),
        store.put_subgraph(key("new"), note="x"),
        store.put_artifact(b"new content"),
        store.record_measurement(measurement(key()), HERE),
        store.decide(decision(key("new"), "eager"), HERE),
        store.program(key().digest),
        store.subgraphs(),
        store.decisions(),
        store.environments(),
        store.stats(),
        store.prune(),
    ]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def file_of(location: StoreLocation) -> Path:
    assert location.sqlite_file is not None
    return location.sqlite_file


# Corrupted -----------------------------------------------------------------------------------------------------------


def overwrite_middle(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[1024:-1024] = os.urandom(len(content) - 2048)
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b"this is no database, it is a text file of some length" * 100),
        lambda file: os.truncate(file, file.stat().st_size // 2 + 100),
        lambda file: os.truncate(file, 50),
        overwrite_middle,
    ],
    ids=["not a database", "truncated", "truncated in the header", "overwritten"],
)
def test_a_corrupted_database_is_a_counted_miss(damage, store, serving, location, caplog) -> None:  # type: ignore[no-untyped-def]  # fixtures only
    tuned(store, key())
    damage(file_of(location))
    assert serving.lookup(key(), HERE) is None
    use_everything(serving)
    assert serving.counters()["fault.corrupted"] >= 2
    assert len(warnings_of(caplog)) == 1
    assert "coexec db verify --repair" in warnings_of(caplog)[0]


def test_a_corrupted_database_is_set_aside_by_repair_and_made_anew(store: Store, location: StoreLocation) -> None:
    tuned(store, key())
    file_of(location).write_bytes(b"x" * 10_000)
    report = store.verify()
    assert report is not None
    assert [problem.repaired for problem in report.problems] == [False]
    assert store.verify(repair=True).problems[0].repaired  # type: ignore[union-attr]
    assert len(list(location.folder.glob("store.sqlite.damaged-*"))) == 1
    assert store.lookup(key(), HERE) is None
    tuned(store, key())


def test_an_empty_file_becomes_a_store(store: Store, location: StoreLocation) -> None:
    location.folder.mkdir(mode=0o700)
    file_of(location).touch()
    tuned(store, key())


def test_a_flipped_bit_in_a_decision_is_a_miss(store: Store, serving: Store, location: StoreLocation) -> None:
    """SQLite itself does not notice: the row's own checksum does."""
    tuned(store, key(), backend="onnxruntime")
    with closing(sqlite3.connect(file_of(location))) as connection:
        connection.execute("UPDATE coexec_decision SET backend = 'onnxruntimf'")
        connection.commit()
    assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {"fault.damaged entry": 1}


def test_a_bit_flipped_in_each_artifact_in_turn_is_never_served(store: Store, serving: Store) -> None:
    made = [tuned(store, key("op", scale=n), os.urandom(1000)) for n in range(8)]
    for number, one in enumerate(made):
        path = store.open_artifact(one.artifacts[0])
        assert path is not None
        content = bytearray(path.read_bytes())
        content[number * 100] ^= 1 << number
        path.chmod(0o600)
        path.write_bytes(bytes(content))
        assert serving.checkout(one) is None
        assert serving.open_artifact(one.artifacts[0]) is None
    assert serving.counters() == {"fault.artifact damaged": 8, "fault.artifact missing": 8}
    healed = [publish(store, os.urandom(10)) for _ in range(2)]
    assert all(serving.open_artifact(ref) for ref in healed)


def test_a_damaged_artifact_is_healed_by_publishing_it_again(store: Store) -> None:
    made = tuned(store, key(), b"good code")
    path = store.open_artifact(made.artifacts[0])
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"g00d code")
    publish(store, b"good code")
    folder = store.checkout(made)
    assert folder is not None
    assert (folder / "model.so").read_bytes() == b"good code"


def test_an_artifact_that_was_damaged_while_in_use_is_noticed_by_the_same_process(store: Store, serving: Store) -> None:
    made = tuned(store, key(), b"good code")
    folder = serving.checkout(made)
    assert folder is not None
    (folder / "model.so").chmod(0o600)
    (folder / "model.so").write_bytes(b"evil code")
    assert serving.checkout(made) is None


# Deleted -------------------------------------------------------------------------------------------------------------


def test_a_store_deleted_under_a_live_process_is_made_anew(serving: Store, location: StoreLocation) -> None:
    """sglang#34231: a wiped shared cache killed running jobs."""
    made = tuned(serving, key())
    shutil.rmtree(location.folder)
    assert serving.lookup(key(), HERE) is None
    assert serving.checkout(made) is None
    assert tuned(serving, key()).artifacts == made.artifacts
    assert "fault.vanished" not in serving.counters()


def test_a_store_deleted_in_the_middle_of_an_operation_is_made_anew(serving: Store, location: StoreLocation) -> None:
    """pytorch#196189: another process cleared the cache between listing and opening."""
    tuned(serving, key())
    database = serving._open()[0]
    calls = []

    def interrupted(connection: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            shutil.rmtree(location.folder)
            raise sqlite3.OperationalError("no such table: coexec_subgraph")

    database.read(interrupted)
    assert len(calls) == 2
    assert serving.lookup(key(), HERE) is None


def test_an_artifact_that_vanishes_is_a_miss(serving: Store) -> None:
    made = tuned(serving, key())
    path = serving.open_artifact(made.artifacts[0])
    assert path is not None
    path.unlink()
    assert serving.checkout(made) is None
    assert serving.counters()["fault.artifact missing"] == 1


# Locked --------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(file: Path, mode: str) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA locking_mode = {mode}")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("UPDATE coexec_schema SET applied_s = 1")
        yield
        connection.execute("ROLLBACK")


def test_readers_do_not_wait_for_a_writer(store: Store, serving: Store, location: StoreLocation) -> None:
    made = tuned(store, key())
    with locked(file_of(location), "NORMAL"):
        assert serving.lookup(key(), HERE) == made
        assert serving.put_subgraph(key(), note="known, so nothing is written")
        assert serving.counters() == {"hit": 1}


def test_a_locked_store_is_given_up_soon_and_then_left_alone(
    store: Store, serving: Store, location: StoreLocation, caplog: pytest.LogCaptureFixture
) -> None:
    made = tuned(store, key())
    with locked(file_of(location), "NORMAL"):
        started = time.monotonic()
        assert not serving.decide(decision(key("new"), "eager"), HERE)
        use_everything(serving)
        assert time.monotonic() - started < 2.0
    assert serving.counters()["fault.locked"] == 1
    assert serving.counters()["fault.paused"] >= 10
    assert len(warnings_of(caplog)) == 1
    time.sleep(health.FIRST_PAUSE_S + 0.1)
    assert serving.lookup(key(), HERE) == made


def test_a_store_locked_for_readers_too_is_a_counted_miss(
    store: Store, serving: Store, location: StoreLocation
) -> None:
    tuned(store, key())
    with locked(file_of(location), "EXCLUSIVE"):
        assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {"fault.locked": 1}


def test_pauses_grow_and_end_with_success(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    state = health.Health()
    for expected in (1.0, 2.0, 4.0):
        state.fault("unreachable", "x")
        now[0] += expected - 0.01
        with pytest.raises(StoreError):
            state.check_pause()
        now[0] += 0.02
        state.check_pause()
    state.well()
    state.fault("locked", "x")
    now[0] += 1.01
    state.check_pause()


# Read-only, full -----------------------------------------------------------------------------------------------------


def owned_by_nobody(folder: Path) -> int | None:
    """Gives the folder away if we are root (whom no mode stops), so that a child can run as its owner."""
    if os.geteuid() != 0:
        return None
    for path in (folder, *folder.rglob("*")):
        os.chown(path, children.NOBODY, children.NOBODY)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and parent != Path("/tmp") and str(parent).startswith("/tmp"):
            parent.chmod(0o755)
    return children.NOBODY


USE_READ_ONLY = """
Store(private_location(Path(sys.argv[2]))).stats()  # imports all that is needed: nobody may not read it afterwards
if sys.argv[3] != "None":
    os.setuid(int(sys.argv[3]))
store = Store(private_location(Path(sys.argv[1])), keyring=Keyring(Path("/nonexistent/keys")), wait_s=0.2)
found = store.lookup(key(), HERE)
folder = store.checkout(found) if found else None
wrote = [store.put_subgraph(key("new")), store.put_artifact(b"new"), store.decide(decision(key("new"), "eager"), HERE)]
print(json.dumps([found is not None, folder is not None, wrote, store.counters()]))
"""


@pytest.mark.parametrize("with_checkout", [True, False])
def test_a_read_only_store_serves_and_takes_nothing(
    store: Store, location: StoreLocation, tmp_path: Path, with_checkout: bool
) -> None:
    made = tuned(store, key())
    if with_checkout:
        store.checkout(made)
    user = owned_by_nobody(location.folder)
    for path in sorted(location.folder.rglob("*"), reverse=True):
        path.chmod(0o500 if path.is_dir() else 0o400)
    location.folder.chmod(0o500)
    try:
        found, folder, wrote, counters = json.loads(
            children.run(USE_READ_ONLY, location.folder, tmp_path / "other", user)
        )
    finally:
        for path in (location.folder, *location.folder.rglob("*")):
            path.chmod(0o700)
    assert found
    assert folder is with_checkout
    assert wrote == [False, None, False]
    assert counters["hit"] == 1
    assert counters["fault.read-only"] == (3 if with_checkout else 4)


FILL_ARTIFACTS = """
store = Store(private_location(Path(sys.argv[1])), wait_s=0.2)
print(json.dumps([store.put_artifact(b"x" * 3_000_000), store.lookup(key(), HERE) is not None, store.counters()]))
"""

LIMIT_FILES = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
"""


def test_an_artifact_that_does_not_fit_is_not_published(store: Store, location: StoreLocation) -> None:
    """A real refusal by the kernel, in a child with a limit on the size of files."""
    tuned(store, key())
    digest, hit, counters = json.loads(children.run(FILL_ARTIFACTS, location.folder, before=LIMIT_FILES))
    assert digest is None
    assert hit
    assert counters == {"fault.disk full": 1, "hit": 1}
    assert list((location.folder / "incoming").iterdir()) == []
    assert store.verify().ok  # type: ignore[union-attr]


def test_a_full_disk_costs_only_what_is_new(
    store: Store, serving: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = tuned(store, key())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert serving.put_artifact(b"new") is None
    assert serving.lookup(key(), HERE) == made
    assert serving.counters() == {"fault.disk full": 1, "hit": 1}
    assert "coexec db prune" in warnings_of(caplog)[0]


def test_a_full_database_serves(store: Store, serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLITE_FULL itself, by a limit on the number of pages."""
    made = tuned(store, key())
    connect = sqlite3.connect

    def small(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)  # type: ignore[call-overload]  # passed through as given
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    wide = decision(key("new"), "eager", reason="long " * 20_000)
    assert not serving.decide(wide, HERE)
    assert serving.counters() == {"fault.disk full": 1}
    assert serving.lookup(key(), HERE) == made


# Newer, foreign, unreachable -----------------------------------------------------------------------------------------


def test_a_store_of_a_newer_coexec_is_left_alone(
    store: Store, serving: Store, location: StoreLocation, caplog: pytest.LogCaptureFixture
) -> None:
    tuned(store, key())
    with closing(sqlite3.connect(file_of(location))) as connection:
        connection.execute(f"INSERT INTO coexec_schema VALUES ({migrations.newest_version() + 1}, 0)")
        connection.commit()
    before = file_of(location).read_bytes()
    use_everything(serving)
    assert set(serving.counters()) == {"fault.newer schema"}
    assert file_of(location).read_bytes() == before
    assert len(warnings_of(caplog)) == 1
    assert "upgrade coexec" in warnings_of(caplog)[0]


def test_a_folder_that_cannot_be_made_is_a_counted_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    serving = Store(private_location(tmp_path / "file" / "store"))
    use_everything(serving)
    assert all(name.startswith("fault.") for name in serving.counters())
    assert len(warnings_of(caplog)) == 1


def test_a_server_that_does_not_answer_is_a_counted_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql+psycopg://me:secret@/coexec?host={tmp_path}"
    serving = Store(shared_location(url, tmp_path / "mine"))
    started = time.monotonic()
    use_everything(serving)
    assert time.monotonic() - started < 5.0
    assert serving.counters()["fault.unreachable"] == 1
    assert len(warnings_of(caplog)) == 1
    assert "secret" not in caplog.text


def test_what_nobody_thought_of_does_not_reach_the_user(serving: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("coexec.subgraphs.rows.decision_rows", broken)
    assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {"fault.unexpected ZeroDivisionError": 1}


def test_a_strict_store_says_everything(store: Store, location: StoreLocation) -> None:
    tuned(store, key())
    file_of(location).write_bytes(b"x" * 10_000)
    with pytest.raises(StoreError, match="repair") as caught:
        store.lookup(key(), HERE)
    assert caught.value.reason == "corrupted"
    assert store.counters()["fault.corrupted"] == 1


def test_a_warning_of_the_store_is_no_python_warning(serving: Store, location: StoreLocation) -> None:
    """Tests run with warnings as errors; so do users. A locked cache must not raise in their step."""
    location.folder.mkdir(mode=0o700)
    file_of(location).write_bytes(b"x" * 10_000)
    assert serving.lookup(key(), HERE) is None
