"""What the store promises when all is well."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import inspect, update

from coexec.subgraphs import migrations, tables
from coexec.subgraphs.artifacts import STALE_S
from coexec.subgraphs.database import Database
from coexec.subgraphs.entries import ArtifactRef, Outcome
from coexec.subgraphs.errors import StoreError
from coexec.subgraphs.key import key_of_text
from coexec.subgraphs.location import StoreLocation, private_location
from coexec.subgraphs.store import Store, open_store
from tests.subgraphs import children
from tests.subgraphs.samples import HERE, decision, elsewhere, key, measurement, publish, tuned


def rows_of(store: Store) -> Database:
    return store._open()[0]


def test_an_unknown_graph_is_a_miss_and_a_decided_one_a_hit(store: Store) -> None:
    assert store.lookup(key(), HERE) is None
    store.put_subgraph(key(), note="model.py:31")
    assert store.lookup(key(), HERE) is None
    wanted = decision(key(), options={"threads": 2}, artifacts=(publish(store, b"code"),), speedup=1.7, decided_s=12.5)
    store.decide(wanted, HERE)
    assert store.lookup(key(), HERE) == wanted
    assert store.counters() == {"miss.unknown_graph": 1, "miss.undecided": 1, "hit": 1}


def test_the_artifacts_of_a_decision_lie_under_their_names(store: Store) -> None:
    refs = publish(store, b"<net/>", "model.xml"), publish(store, b"weights", "model.bin")
    store.decide(decision(key(), artifacts=refs), HERE)
    found = store.lookup(key(), HERE)
    assert found is not None
    folder = store.checkout(found)
    assert folder is not None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "model.xml": b"<net/>",
        "model.bin": b"weights",
    }
    assert store.checkout(found) == folder


def test_an_artifact_is_kept_once_whatever_its_name_and_source(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "built.so"
    file.write_bytes(b"code")
    digests = {store.put_artifact(b"code"), store.put_artifact(file), store.put_artifact(iter([b"co", b"de"]))}
    assert len(digests) == 1
    path = store.open_artifact(digests.pop() or "")
    assert path is not None
    assert path.read_bytes() == b"code"
    assert path.stat().st_mode & 0o777 == 0o400
    assert list(path.parents[2].glob("incoming/*")) == []


def test_other_content_than_promised_is_not_published(store: Store) -> None:
    promised = publish(store, b"good").digest
    with pytest.raises(StoreError, match="refused"):
        store.put_artifact(b"evil", expected=promised)
    assert store.stats().artifacts == 1  # type: ignore[union-attr]


def test_a_decision_about_another_environment_does_not_count(store: Store) -> None:
    tuned(store, key())
    there = elsewhere(torch="2.8.0")
    assert store.lookup(key(), there) is None
    assert store.explain_miss(key(), there) == "tuned in another environment: torch: 2.13.0 -> 2.8.0"
    assert store.counters()["miss.other_environment"] == 1


def test_a_tuning_result_belongs_to_a_class_of_shapes(store: Store) -> None:
    """OneTrainer#1626: the first fit was used for every shape."""
    tuned(store, key(shape_class="s0<=8"), backend="inductor")
    tuned(store, key(shape_class="s0<=512"), backend="onnxruntime")
    assert store.lookup(key(shape_class="s0<=8"), HERE).backend == "inductor"  # type: ignore[union-attr]
    assert store.lookup(key(shape_class="s0<=512"), HERE).backend == "onnxruntime"  # type: ignore[union-attr]
    assert store.lookup(key(shape_class="s0<=64"), HERE) is None
    assert store.counters()["miss.other_shape"] == 1


def test_baked_weights_are_not_served_to_another_model(store: Store) -> None:
    theirs, ours = "a" * 64, "b" * 64
    made = tuned(store, key(), constants=theirs, options={"freezing": True})
    assert made.artifacts
    recipe = store.lookup(key(), HERE, ours)
    assert recipe is not None
    assert (recipe.backend, recipe.options, recipe.artifacts, recipe.constants) == (
        "onnxruntime",
        {"freezing": True},
        (),
        "",
    )
    assert tuned(store, key(), b"ours", constants=ours).artifacts != made.artifacts
    assert store.lookup(key(), HERE, theirs) == made


def test_a_decision_for_any_weights_serves_every_model(store: Store) -> None:
    made = tuned(store, key())
    assert store.lookup(key(), HERE, "c" * 64) == made


def test_a_near_miss_names_the_entry_that_differs(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put_subgraph(key(scale=1.0))
    with caplog.at_level(logging.INFO, "coexec.subgraphs"):
        assert store.lookup(key(scale=2.0), HERE) is None
    assert "%0 aten.relu.default scale: 1.0 -> 2.0" in caplog.text
    assert store.counters()["miss.near_graph"] == 1
    assert store.explain_miss(key("gelu"), HERE) == "no stored graph has the same ops"


def test_a_later_decision_replaces_the_earlier_whole(store: Store) -> None:
    tuned(store, key(), b"old", backend="inductor", options={"a": 1})
    store.decide(decision(key(), "eager", reason="nothing was faster"), HERE)
    found = store.lookup(key(), HERE)
    assert found is not None
    assert (found.backend, found.options, found.artifacts) == ("eager", {}, ())


def test_a_decision_can_be_forgotten(store: Store) -> None:
    made = tuned(store, key())
    store.forget_decision(made)
    assert store.lookup(key(), HERE) is None


def test_measurements_come_back_as_they_were_made(store: Store) -> None:
    good = measurement(
        key(), options={"threads": 2}, spread_s=1e-5, eager_s=0.002, compile_s=3.5, measured_s=1.0, id="1"
    )
    bad = measurement(key(), "tvm", outcome=Outcome.CRASH, detail="SIGSEGV", median_s=None, measured_s=2.0, id="2")
    store.record_measurement(good, HERE)
    store.record_measurement(bad, HERE)
    store.record_measurement(good, HERE)
    assert store.measurements(key().digest) == (good, bad)
    assert store.measurements(key().digest, elsewhere(threads="1").digest) == ()


def test_compiler_output_that_databases_refuse_is_kept_readable(store: Store) -> None:
    store.record_measurement(measurement(key(), detail="bad \0 byte \udcff"), HERE)
    assert store.measurements(key().digest)[0].detail == "bad \\0 byte \\udcff"


def test_the_program_of_a_subgraph_is_kept_for_the_tuner(store: Store) -> None:
    assert store.program(key().digest) is None
    store.put_subgraph(key())
    store.put_subgraph(key(), program=b"graph")
    path = store.program(key().digest)
    assert path is not None
    assert path.read_bytes() == b"graph"
    store.put_subgraph(key(), program=b"another spelling")
    assert store.program(key().digest) == path


def test_the_tuner_finds_what_waits_for_it(store: Store) -> None:
    store.put_subgraph(key("relu"))
    store.put_subgraph(key("gelu"))
    tuned(store, key("relu"))
    assert [info.digest for info in store.subgraphs(undecided_in=HERE)] == [key("gelu").digest]
    assert len(store.subgraphs(undecided_in=elsewhere(threads="1"))) == 2
    assert len(store.subgraphs(limit=1)) == 1


def test_a_subgraph_is_found_by_the_beginning_of_its_digest(store: Store) -> None:
    store.put_subgraph(key(), note="model.py:31")
    info = store.subgraph(key().digest[:10])
    assert info is not None
    assert (info.text, info.note, info.n_ops) == (key().text, "model.py:31", 1)
    assert store.subgraph("%") is None


def test_stats_count_everything(store: Store) -> None:
    tuned(store, key("relu"), b"12345")
    store.put_subgraph(key("gelu"), program=b"123")
    store.record_measurement(measurement(key()), HERE)
    stats = store.stats()
    assert stats is not None
    assert (stats.subgraphs, stats.decided, stats.measurements, stats.environments) == (2, 1, 1, 1)
    assert (stats.artifacts, stats.artifact_bytes, stats.backends) == (2, 8, {"onnxruntime": 1})
    assert stats.database_bytes


# Arguments -----------------------------------------------------------------------------------------------------------


def test_wrong_arguments_raise_even_in_a_serving_store(serving: Store) -> None:
    with pytest.raises(ValueError, match="no artifact digest"):
        serving.open_artifact("../../etc/passwd")
    with pytest.raises(ValueError, match="artifact name"):
        ArtifactRef("../model.so", "a" * 64, 1)
    with pytest.raises(ValueError, match="given with environment"):
        serving.decide(decision(key()), elsewhere(threads="1"))
    with pytest.raises(ValueError, match="not finite"):
        serving.record_measurement(measurement(key(), median_s=float("nan")), HERE)
    with pytest.raises(ValueError, match="JSON"):
        serving.decide(decision(key(), options={"x": float("nan")}), HERE)
    with pytest.raises(ValueError, match="does not belong to its text"):
        serving.put_subgraph(key_of_text("a", []).__class__("0" * 64, "a", "0" * 64))
    assert serving.counters() == {}


def test_a_decision_cannot_name_an_artifact_that_was_never_published(store: Store) -> None:
    with pytest.raises(StoreError, match="put_artifact comes first"):
        store.decide(decision(key(), artifacts=(ArtifactRef("model.so", "d" * 64, 1),)), HERE)
    assert store.lookup(key(), HERE) is None


def test_two_files_of_a_decision_cannot_have_one_name(store: Store) -> None:
    refs = publish(store, b"1"), publish(store, b"2")
    with pytest.raises(ValueError, match="same name"):
        store.checkout(decision(key(), artifacts=refs))


# Location ------------------------------------------------------------------------------------------------------------


def test_the_cache_folder_is_read_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#167725, pytorch#178858: workers kept a deleted folder, the user's setting was ignored."""
    store = open_store(strict=True)
    monkeypatch.delenv("COEXEC_STORE", raising=False)
    for name in ("one", "two"):
        monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / name))
        assert store.lookup(key(), HERE) is None
        store.put_subgraph(key())
        assert (tmp_path / name / "subgraphs" / "store.sqlite").exists()
    assert len(store.subgraphs()) == 1


def test_any_url_can_be_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COEXEC_STORE", f"sqlite:///{tmp_path}/team/x.sqlite")
    store = open_store(strict=True)
    assert store.location.shared
    assert store.lookup(key(), HERE) is None
    assert (tmp_path / "team" / "x.sqlite").exists()


@pytest.mark.parametrize(("url", "reason"), [("nonsense", "bad url"), ("oracle9://x/y", "bad url")])
def test_a_bad_url_says_what_a_good_one_looks_like(
    url: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COEXEC_STORE", url)
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(StoreError, match=r"postgresql\+psycopg://"):
        open_store(strict=True).lookup(key(), HERE)
    serving = open_store()
    assert serving.lookup(key(), HERE) is None
    assert serving.counters() == {f"fault.{reason}": 1}


def test_a_driver_that_is_missing_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setenv("COEXEC_STORE", "postgresql+psycopg://me@host/coexec")
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path))
    with pytest.raises(StoreError, match=r"in a checkout of coexec: pip install '\.\[postgresql\]'") as caught:
        open_store(strict=True).lookup(key(), HERE)
    assert caught.value.reason == "no driver"


# Threads and forks ---------------------------------------------------------------------------------------------------


def test_threads_share_a_store(store: Store) -> None:
    """pytorch#192368: a cache opened from two threads crashed."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(5):
                made = tuned(store, key("op", scale=number * 10 + round_), f"{number} {round_}".encode())
                assert store.checkout(made)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert errors == []
    assert store.stats().decided == 20  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_uses_the_store_as_its_parent_does(store: Store) -> None:
    made = tuned(store, key())
    child = os.fork()
    if child == 0:
        good = store.lookup(key(), HERE) == made and store.put_subgraph(key("gelu"))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(store.subgraphs()) == 2


# Pruning and verifying -----------------------------------------------------------------------------------------------


def age(store: Store, table_name: str, seconds: float) -> None:
    table = tables.metadata.tables[table_name]
    rows_of(store).write(lambda c: c.execute(update(table).values(used_s=time.time() - seconds)))


def test_what_was_not_used_for_long_is_pruned(store: Store) -> None:
    tuned(store, key("relu"))
    age(store, "coexec_subgraph", 100 * 86400.0)
    age(store, "coexec_decision", 100 * 86400.0)
    tuned(store, key("gelu"), b"other")
    store.record_measurement(measurement(key("relu"), measured_s=1.0), HERE)
    report = store.prune(unused_s=30 * 86400.0)
    assert report is not None
    assert (report.subgraphs, report.decisions, report.measurements) == (1, 1, 1)
    assert [info.digest for info in store.subgraphs()] == [key("gelu").digest]
    assert store.lookup(key("gelu"), HERE) is not None


def test_a_lookup_keeps_an_entry_alive(store: Store) -> None:
    tuned(store, key())
    age(store, "coexec_subgraph", 100 * 86400.0)
    age(store, "coexec_decision", 100 * 86400.0)
    assert store.lookup(key(), HERE) is not None
    assert store.prune(unused_s=30 * 86400.0).subgraphs == 0  # type: ignore[union-attr]


def test_pruning_to_a_size_keeps_the_recipe_and_the_latest_used(store: Store) -> None:
    old = tuned(store, key("relu"), b"x" * 100, options={"recipe": 1})
    new = tuned(store, key("gelu"), b"y" * 100)
    path = store.open_artifact(old.artifacts[0])
    assert path is not None
    os.utime(path, (1, 1))
    assert store.prune(max_bytes=150).artifact_bytes == 100  # type: ignore[union-attr]
    assert not path.exists()
    assert store.lookup(key("relu"), HERE) == old.recipe()
    assert store.lookup(key("gelu"), HERE) == new
    assert store.verify().ok  # type: ignore[union-attr]


def test_pruning_removes_orphans_only_when_no_writer_can_be_about_to_name_them(store: Store) -> None:
    young, old = publish(store, b"young"), publish(store, b"old")
    path = store.open_artifact(old)
    assert path is not None
    os.utime(path, (time.time() - 2 * STALE_S,) * 2)
    store.prune()
    assert store.open_artifact(young) is not None
    assert not path.exists()


def test_leftovers_of_killed_writers_are_swept(store: Store, location: StoreLocation) -> None:
    publish(store, b"x")
    leftover = location.folder / "incoming" / "abc.part"
    leftover.write_bytes(b"half")
    assert store.prune().leftovers == 0  # type: ignore[union-attr]
    os.utime(leftover, (1, 1))
    assert store.prune().leftovers == 1  # type: ignore[union-attr]
    assert not leftover.exists()


def test_verify_finds_nothing_in_a_good_store(store: Store) -> None:
    tuned(store, key())
    report = store.verify()
    assert report is not None
    assert report.ok
    assert report.checked == 3


def test_verify_finds_and_repairs_a_changed_row_and_a_changed_file(store: Store) -> None:
    made = tuned(store, key("relu"))
    tuned(store, key("gelu"), b"other")
    d = tables.decision
    bad = d.c.subgraph == key("gelu").digest
    rows_of(store).write(lambda c: c.execute(update(d).where(bad).values(backend="evil")))
    path = store.open_artifact(made.artifacts[0])
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"machine c0de")
    found = store.verify(repair=True)
    assert found is not None
    assert sorted(problem.kind for problem in found.problems) == ["artifact", "decision", "decision"]
    assert store.verify().ok  # type: ignore[union-attr]
    assert store.lookup(key("gelu"), HERE) is None


# Schema --------------------------------------------------------------------------------------------------------------


def test_the_migrations_end_at_the_tables_the_code_uses(store: Store) -> None:
    store.lookup(key(), HERE)

    def columns(connection: object) -> dict[str, set[str]]:
        inspector = inspect(connection)
        return {name: {c["name"] for c in inspector.get_columns(name)} for name in inspector.get_table_names()}

    expected = {name: {c.name for c in table.columns} for name, table in tables.metadata.tables.items()}
    assert rows_of(store).read(columns) == expected


def test_a_store_of_the_first_schema_keeps_its_rows_and_has_been_told_no_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        made = tuned(store, key())
        assert rows_of(store).read(migrations.schema_version) == 1
    assert store.lookup(key(), HERE) == made
    (info,) = store.subgraphs()
    assert (info.run_s, info.runs, info.note) == (None, 0, "model.py:31")


def test_an_older_store_is_migrated_step_by_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(store, key())
    newest = migrations.newest_version() + 1
    step = migrations.Migration(
        newest, ("ALTER TABLE coexec_subgraph ADD COLUMN colour TEXT", "CREATE TABLE extra (x {blob})")
    )
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, step))
    assert store.lookup(key(), HERE) is not None
    assert rows_of(store).read(migrations.schema_version) == newest
    names = rows_of(store).read(lambda c: {column["name"] for column in inspect(c).get_columns("coexec_subgraph")})
    assert "colour" in names


def test_a_migration_that_fails_leaves_the_store_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuned(store, key())
    with monkeypatch.context() as patch:
        newest = migrations.newest_version() + 1
        step = migrations.Migration(newest, ("CREATE TABLE half (x TEXT)", "SELECT nonsense FROM nowhere"))
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, step))
        with pytest.raises(StoreError):
            store.lookup(key(), HERE)
    assert store.lookup(key(), HERE) == made
    assert "half" not in rows_of(store).read(lambda c: inspect(c).get_table_names())


def test_a_store_can_be_named_by_its_folder(tmp_path: Path) -> None:
    location = private_location(tmp_path / "a b")
    assert Store(location, strict=True).lookup(key(), HERE) is None
    assert location.sqlite_file == tmp_path / "a b" / "store.sqlite"
    assert (tmp_path / "a b").stat().st_mode & 0o777 == 0o700


def test_keeping_and_finding_entries_needs_no_torch() -> None:
    """`coexec db list` must not take the seconds that importing torch takes."""
    code = """
    import coexec.subgraphs.store, coexec.subgraphs.transfer
    print([name for name in ("torch", "sympy", "numpy") if name in sys.modules])
    """
    assert children.run(code) == "[]\n"
