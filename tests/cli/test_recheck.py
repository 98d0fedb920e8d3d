"""`coexec recheck` times stored decisions anew and says which ones do not hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coexec.cli.app import PROBLEM, USAGE
from coexec.report import recheck as library
from coexec.report.recheck import Recheck
from coexec.subgraphs.entries import ArtifactRef, Decision, Outcome
from coexec.subgraphs.store import Store
from coexec.tuning.identity import environment_of
from coexec.tuning.program_file import save_program
from coexec.tuning.turns import Timing
from tests.cli.conftest import Answer, Run
from tests.tuning.conftest import planted_candidates, planted_folder  # noqa: F401 - fixtures
from tests.tuning.graphs import climbing, key_of
from tests.tuning.planted import STEPS

THREADS = 1


@dataclass
class Decided:
    """A store whose decisions name planted backends."""

    store: Store
    folder: Path

    def decide(self, backend: str, size: int, **fields: Any) -> str:
        """Store a program of `size` with a decision for `backend`; returns its digest."""
        program, path = climbing(size), self.folder / f"program{size}"
        save_program(program, path)
        key = key_of(program)
        self.store.put_subgraph(key, program=path, note=f"net.py:{size}")
        content = json.dumps({"steps": STEPS, "threads": THREADS}).encode()
        digest = self.store.put_artifact(content)
        assert digest is not None
        environment = environment_of((), THREADS)
        options = {"metadata": {"made_by": backend}, "threads": THREADS}
        artifact = ArtifactRef("data.json", digest, len(content))
        decision = Decision(key.digest, environment.digest, backend, options=options, artifacts=(artifact,), **fields)
        self.store.decide(decision, environment)
        return key.digest


@pytest.fixture
def decided(store: Store, home: Path) -> Decided:
    return Decided(store, home)


def rows_of(answer: Answer) -> dict[str, dict[str, Any]]:
    return {row["backend"]: row for row in answer.json()}


def test_decisions_that_hold_and_that_do_not(run: Run, decided: Decided) -> None:
    fast = decided.decide("planted-fast", 40, speedup=9.0)
    decided.decide("planted-slow", 41, speedup=3.0)
    decided.decide("planted-wrong", 42, speedup=5.0)
    answer = run("recheck", "--threads", THREADS, "--rounds", 3, "--json")
    assert answer.status == PROBLEM
    rows = rows_of(answer)
    assert set(rows) == {"planted-fast", "planted-slow", "planted-wrong"}
    good = rows["planted-fast"]
    assert (good["subgraph"], good["holds"], good["outcome"], good["decided"]) == (fast, True, "ok", 9.0)
    assert good["timing"]["ratio"] > 2
    assert rows["planted-slow"]["timing"]["high"] < 1
    assert not rows["planted-slow"]["holds"]
    assert rows["planted-wrong"]["outcome"] == "wrong"
    assert rows["planted-wrong"]["timing"] is None


def test_the_table_names_what_does_not_hold(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Timing(4e-3, 1e-3, 1e-5, 4.0, 3.9, 4.1, 9), Timing(1e-3, 2e-3, 1e-5, 0.5, 0.4, 0.6, 9)
    rows = (
        Recheck("ab" * 32, "net.py:1", "tvm", 3.5, Outcome.OK, "", fast),
        Recheck("cd" * 32, "net.py:2", "openvino", 1.2, Outcome.OK, "", slow),
        Recheck("ef" * 32, "net.py:3", "onnxruntime", None, Outcome.WRONG, "off by 3", None),
    )
    monkeypatch.setattr(library, "recheck", lambda store, **options: rows)
    answer = run("recheck")
    assert answer.status == PROBLEM
    for words in ("4.00x [3.90, 4.10]", "3.50x", "4 ms", "wrong: off by 3"):
        assert words in answer.out
    assert "coexec tune --retune cdcdcdcdcdcdcdcd efefefefefefefef" in answer.out
    monkeypatch.setattr(library, "recheck", lambda store, **options: rows[:1])
    assert run("recheck").status == 0


def test_an_interval_that_tells_nothing_is_no_ratio(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, good = Timing(4e-3, 1e-3, 1e-3, 3.7, 0.8, 9.1, 9), Timing(4e-3, 1e-3, 1e-5, 4.0, 3.9, 4.1, 9)
    rows = (
        Recheck("ab" * 32, "net.py:1", "tvm", 1.3, Outcome.OK, "", wide, busy_cores=1.26),
        Recheck("cd" * 32, "net.py:2", "openvino", 4.2, Outcome.OK, "", good, busy_cores=0.0),
    )
    monkeypatch.setattr(library, "recheck", lambda store, **options: rows)
    answer = run("recheck")
    assert answer.status == 0
    assert "too wide: [0.80, 9.10]" in answer.out
    assert "3.70x" not in answer.out
    assert "4.00x [3.90, 4.10]" in answer.out
    assert "1 of 2 intervals are too wide" in answer.out
    assert "up to 1.3 cores" in answer.out
    found = {row["backend"]: (row["wide"], row["busy_cores"]) for row in run("recheck", "--json").json()}
    assert found == {"tvm": (True, 1.26), "openvino": (False, 0.0)}


def test_only_the_named_subgraphs_are_timed(run: Run, decided: Decided, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [decided.decide("planted-fast", size) for size in (40, 41)]
    monkeypatch.setattr(library._Bench, "timed", lambda bench, decision: None)
    assert [row["subgraph"] for row in run("recheck", "--threads", THREADS, digests[1], "--json").json()] == digests[1:]
    assert len(run("recheck", "--threads", THREADS, "--json").json()) == 2


def test_a_beginning_that_no_stored_digest_has_is_wrong_usage(
    run: Run, decided: Decided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside one that is known: nothing is timed, since what was meant is not."""
    digest = decided.decide("planted-fast", 40)
    monkeypatch.setattr(library, "recheck", lambda store, **options: pytest.fail("something was timed"))
    unknown = "f" * 16 if digest.startswith("0") else "0" * 16
    for words in ((unknown,), (digest[:16], unknown)):
        answer = run("recheck", *words)
        assert answer.status == USAGE
        assert f"no subgraph begins with '{unknown}'" in answer.err


def test_an_artifact_that_was_altered_is_not_run(run: Run, decided: Decided) -> None:
    digest = decided.decide("planted-fast", 40)
    (chosen,) = decided.store.decisions(digest)
    path = decided.store.open_artifact(chosen.artifacts[0])
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(b"altered")
    answer = run("recheck", "--threads", THREADS)
    assert answer.status == PROBLEM
    assert chosen.artifacts[0].digest[:16] in answer.err


def test_without_decisions_for_this_thread_count_there_is_nothing_to_time(run: Run, decided: Decided) -> None:
    decided.decide("planted-fast", 40)
    answer = run("recheck", "--threads", THREADS + 1)
    assert answer.status == 0
    assert "coexec db list" in answer.out


def test_a_known_digest_without_a_decision_for_this_thread_count_is_no_wrong_usage(run: Run, decided: Decided) -> None:
    digest = decided.decide("planted-fast", 40)
    answer = run("recheck", digest[:16], "--threads", THREADS + 1)
    assert answer.status == 0
    assert "No decision" in answer.out
