"""`coexec db`: each command says what the library says, as a table and as JSON."""

from __future__ import annotations

import base64
import sqlite3
import time
from pathlib import Path

import pytest

from coexec.backends.key import key_text
from coexec.cli.app import PROBLEM, USAGE
from coexec.subgraphs import tables
from coexec.subgraphs.entries import Decision, Outcome
from coexec.subgraphs.segment_cache import environment_of_segments, key_of_segment
from coexec.subgraphs.store import Store
from coexec.subgraphs.trust import Keyring
from tests.backends.test_spec import small_spec
from tests.cli.conftest import Run
from tests.subgraphs.samples import HERE, decision, key, measurement, publish, tuned


def test_list_names_each_subgraph_with_its_choice(run: Run, store: Store) -> None:
    tuned(store, key("relu"), speedup=1.8)
    store.put_subgraph(key("tanh"), note="net.py:7 [bold]")
    header, *rows = run("db", "list").out.splitlines()
    assert header.split() == ["subgraph", "ops", "backend", "speedup", "used", "note"]
    by_digest = {row.split()[0]: row for row in rows}
    assert by_digest[key("relu").digest[:16]].split() == [
        key("relu").digest[:16], "1", "onnxruntime", "1.80x", "just", "now", "model.py:31",
    ]  # fmt: skip
    assert by_digest[key("tanh").digest[:16]].rstrip().endswith("net.py:7 [bold]")


def test_list_as_json_holds_whole_decisions(run: Run, store: Store) -> None:
    chosen = tuned(store, key("relu"), speedup=1.8, options={"opset": 18})
    (entry,) = run("db", "list", "--json").json()
    assert entry["digest"] == key("relu").digest
    assert entry["decisions"][0]["options"] == {"opset": 18}
    assert entry["decisions"][0]["artifacts"][0]["digest"] == chosen.artifacts[0].digest


def test_list_undecided_and_limit(run: Run, store: Store) -> None:
    """What `coexec tune` would work on: it needs a program, and a decision of another environment is none here."""
    for name in ("tanh", "sin"):
        store.put_subgraph(key(name), program=b"a program")
    store.put_subgraph(key("cos"))
    undecided = {entry["digest"] for entry in run("db", "list", "--undecided", "--json").json()}
    assert undecided == {key("tanh").digest, key("sin").digest}
    assert len(run("db", "list", "--undecided", "--limit", "1", "--json").json()) == 1


def test_list_stats_and_report_agree_that_a_compiled_segment_waits_for_the_tuner(run: Run, store: Store) -> None:
    text = key_text(small_spec())
    digest, here = key_of_segment(text).digest, environment_of_segments()
    store.put_subgraph(key_of_segment(text), program=b"a program", note="train_step, train.py:12: segment of 2 ops")
    store.decide(Decision(digest, here.digest, "coexec-segment"), here)
    assert [entry["digest"] for entry in run("db", "list", "--undecided", "--json").json()] == [digest]
    stats = run("db", "stats", "--json").json()
    assert (stats["decided"], stats["tuned"], stats["waiting"]) == (1, 0, 1)
    assert "1, 0 tuned, 1 wait for `coexec tune` here" in run("db", "stats").out
    assert run("report", "--json").json()["waiting"] == [digest]
    assert "train_step, train.py:12" in run("report").out


def test_a_segment_that_is_passed_over_waits_nowhere_and_says_why(run: Run, store: Store, home: Path) -> None:
    text = key_text(small_spec())
    digest = key_of_segment(text).digest
    store.put_subgraph(key_of_segment(text), program=b"a program")
    store.note_runs(digest, 6e-6, 100)
    assert run("db", "list", "--undecided", "--json").json() == []
    assert run("db", "stats", "--json").json()["waiting"] == 0
    assert "one run takes 6.0 us" in run("report", "--html", home / "page.html").out
    assert "one run takes 6.0 us" in (home / "page.html").read_text()
    assert "6 us, of 100 that were told" in run("db", "show", digest[:12]).out


def test_a_damaged_decision_is_left_out_of_the_list(run: Run, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    chosen = tuned(store, key("relu"), content=b"first")
    tuned(store, key("tanh"), content=b"second")
    damage_decision(store, chosen.subgraph)
    backends = {entry["digest"]: entry["decisions"] for entry in run("db", "list", "--json").json()}
    assert backends[key("relu").digest] == []
    assert len(backends[key("tanh").digest]) == 1
    assert "does not match its checksum" in caplog.text


def damage_decision(store: Store, subgraph: str) -> None:
    """Change a stored decision behind the store's back."""
    assert store.location.sqlite_file is not None
    with sqlite3.connect(store.location.sqlite_file) as connection:
        statement = f"UPDATE {tables.decision.name} SET backend = 'tvm' WHERE subgraph = ?"
        assert connection.execute(statement, (subgraph,)).rowcount == 1
    connection.close()


def test_show_prints_decisions_attempts_and_environments(run: Run, store: Store) -> None:
    tuned(store, key("relu"), speedup=2.5, reason="fastest of 3")
    attempt = measurement(key("relu"), "tvm", outcome=Outcome.CRASH, median_s=None, detail="SIGSEGV while building")
    store.record_measurement(attempt, HERE)
    out = run("db", "show", key("relu").digest[:12]).out
    for expected in ("fastest of 3", "2.50x", "crash", "SIGSEGV while building", "cpu.features", "avx2 avx512f"):
        assert expected in out
    document = run("db", "show", key("relu").digest[:12], "--json", "--text").json()
    assert document["text"] == key("relu").text
    assert document["measurements"][0]["outcome"] == "crash"
    assert document["environments"][HERE.digest]["threads"] == "2"


def test_show_why_says_what_differs_here(run: Run, store: Store) -> None:
    tuned(store, key("relu"))
    assert "torch: 2.13.0 ->" in run("db", "show", key("relu").digest, "--why", "--json").json()["lookup_here"]


def test_show_why_finds_what_the_tuner_chose_for_a_segment(run: Run, store: Store) -> None:
    text = key_text(small_spec())
    store.put_subgraph(key_of_segment(text))
    here = environment_of_segments()
    reason = "coexec-segment-fma: 1.083x of coexec-segment's 3.1 ms"
    store.decide(Decision(key_of_segment(text).digest, here.digest, "coexec-segment-fma", reason=reason), here)
    found = run("db", "show", key_of_segment(text).digest, "--why", "--json").json()["lookup_here"]
    assert found == f"coexec-segment-fma: {reason}"


@pytest.mark.parametrize(("prefix", "words"), [("zz", "coexec db list"), ("", "more digits")])
def test_a_digest_that_names_none_or_several_is_wrong_usage(run: Run, store: Store, prefix: str, words: str) -> None:
    for name in ("relu", "tanh"):
        store.put_subgraph(key(name))
    answer = run("db", "show", prefix)
    assert answer.status == USAGE
    assert words in answer.err


def test_stats_counts(run: Run, store: Store) -> None:
    tuned(store, key("relu"), content=b"x" * 2048)
    store.put_subgraph(key("tanh"))
    document = run("db", "stats", "--json").json()
    assert (document["subgraphs"], document["decided"], document["artifact_bytes"]) == (2, 1, 2048)
    assert "2.0 KiB" in run("db", "stats").out


def test_prune_takes_units(run: Run, store: Store) -> None:
    tuned(store, key("relu"), content=b"x" * 4096)
    report = run("db", "prune", "--max-bytes", "2K", "--json").json()
    assert (report["artifacts"], report["artifact_bytes"]) == (1, 4096)
    assert run("db", "prune", "--unused", "30d", "--json").json()["subgraphs"] == 0
    time.sleep(0.01)
    assert "Deleted 1 subgraphs, 1 decisions" in run("db", "prune", "--unused", "0").out
    assert store.subgraphs() == ()


def test_verify_finds_then_repairs(run: Run, store: Store) -> None:
    chosen = tuned(store, key("relu"))
    assert run("db", "verify").status == 0
    damage_decision(store, chosen.subgraph)
    found = run("db", "verify", "--json")
    assert found.status == PROBLEM
    assert found.json()["problems"][0]["kind"] == "decision"
    assert "coexec db verify --repair" in run("db", "verify").out
    assert run("db", "verify", "--repair").status == 0
    assert run("db", "verify").status == 0
    assert store.decisions() == ()


def test_a_store_travels_as_one_file(
    run: Run, store: Store, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tuned(store, key("relu"), content=b"machine code")
    file = home / "tuned.coexec"
    assert "Exported 1 subgraphs, 1 decisions" in run("db", "export", file).out
    assert run("db", "export", file).status == USAGE
    assert run("db", "export", file, "--force", "--json").json()["artifacts"] == 1
    public_key = run("db", "key", "--json").json()["public_key"]

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(elsewhere / "cache"))
    refused = run("db", "import", file)
    assert refused.status == PROBLEM
    assert "coexec db key --trust" in refused.err
    assert run("db", "key", "--trust", public_key, "--who", "build farm").status == 0
    assert run("db", "import", file, "--json").json()["decisions"] == 1
    assert run("db", "import", file, "--json").json()["kept"] == 1
    assert run("db", "list", "--json").json()[0]["digest"] == key("relu").digest


def test_export_of_one_environment_needs_its_digest(run: Run, store: Store, home: Path) -> None:
    tuned(store, key("relu"))
    assert run("db", "export", home / "a", "--environment", "none").status == USAGE
    report = run("db", "export", home / "a", "--environment", HERE.digest[:8], "--no-artifacts", "--json").json()
    assert (report["decisions"], report["artifacts"]) == (1, 0)


def test_key_is_made_once_and_trusts_only_keys(run: Run, home: Path) -> None:
    assert run("db", "key", "--json").json()["public_key"] is None
    assert "coexec db key --create" in run("db", "key").out
    made = run("db", "key", "--create", "--json").json()["public_key"]
    assert run("db", "key", "--create", "--json").json()["public_key"] == made
    assert made == Keyring(home / ".config" / "coexec" / "keys").public_key()
    refused = run("db", "key", "--trust", base64.b64encode(b"short").decode())
    assert refused.status == PROBLEM
    assert "44 characters" in refused.err
    assert run("db", "key", "--who", "nobody").status == USAGE


def test_two_decisions_show_their_range(run: Run, store: Store) -> None:
    store.put_subgraph(key("relu"))
    for name, speedup in (("a", 1.5), ("b", 2.5)):
        artifact = publish(store, name.encode())
        store.decide(decision(key("relu"), constants=name * 64, speedup=speedup, artifacts=(artifact,)), HERE)
    assert "1.50x..2.50x" in run("db", "list").out
