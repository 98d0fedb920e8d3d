"""`coexec report` tells what is in the store: winners, failures, environments; text from outside stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from coexec.report.store_report import report_store
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.store import Store
from tests.cli.conftest import Run
from tests.subgraphs.samples import HERE, decision, elsewhere, key, measurement, tuned


@pytest.fixture
def filled(store: Store) -> Store:
    """Two tuned subgraphs and one that waits."""
    for name, seconds in (("relu", 0.001), ("tanh", 0.002)):
        tuned(store, key(name), content=name.encode(), speedup=0.004 / seconds, reason=f"fastest on {name}")
        store.record_measurement(measurement(key(name), median_s=seconds, eager_s=0.004), HERE)
        crash = measurement(key(name), "tvm", outcome=Outcome.CRASH, median_s=None, detail="SIGSEGV in <codegen>")
        store.record_measurement(crash, HERE)
    store.put_subgraph(key("sin"), program=b"a program", note="<script>alert(1)</script>")
    return store


def test_backends_are_summed_up(filled: Store) -> None:
    winner, loser = report_store(filled).backends
    assert (winner.backend, winner.chosen, winner.tried, winner.outcomes) == ("onnxruntime", 2, 2, {"ok": 2})
    assert winner.mean_speedup == pytest.approx((4.0 * 2.0) ** 0.5)
    assert (loser.backend, loser.chosen, loser.mean_speedup) == ("tvm", 0, None)
    assert loser.common_failure == "SIGSEGV in <codegen>"


def test_one_choice_for_several_weights_is_one(filled: Store) -> None:
    """An attempt is one, whichever weights it baked in: no backend is chosen more often than it was tried."""
    filled.decide(decision(key("relu"), constants="ab" * 32), HERE)
    winner = next(row for row in report_store(filled).backends if row.backend == "onnxruntime")
    assert (winner.chosen, winner.tried) == (2, 2)


def test_the_newest_attempt_of_a_backend_counts(filled: Store) -> None:
    filled.record_measurement(measurement(key("relu"), "tvm", median_s=0.0005, eager_s=0.004), HERE)
    row = next(row for row in report_store(filled).subgraphs if row.digest == key("relu").digest)
    assert [(attempt.backend, attempt.speedup) for attempt in row.attempts] == [
        ("tvm", pytest.approx(8.0)),
        ("onnxruntime", pytest.approx(4.0)),
    ]


def test_environments_are_told_by_what_differs(filled: Store) -> None:
    older = elsewhere(threads="8")
    filled.decide(decision(key("sin"), environment=older.digest, decided_s=1.0), older)
    rows = {row.digest: row for row in report_store(filled).environments}
    assert rows[HERE.digest].differences == ()
    assert [str(difference) for difference in rows[older.digest].differences] == ["threads: 2 -> 8"]


def test_text_and_json(run: Run, filled: Store) -> None:
    out = run("report").out
    assert "3 subgraphs, 1 wait for `coexec tune`" in out
    assert "SIGSEGV in <codegen>" in out
    document = run("report", "--json").json()
    assert {row["digest"] for row in document["subgraphs"]} == {key(name).digest for name in ("relu", "tanh", "sin")}


class Tags(HTMLParser):
    """Counts tags and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_holds_no_markup_of_the_store(run: Run, filled: Store, home: Path) -> None:
    file = home / "store.html"
    assert f"Wrote {file}" in run("report", "--html", file).out
    text, tags = file.read_text(), Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert "http" not in text
    for words in ("&lt;script&gt;alert(1)", "SIGSEGV in &lt;codegen&gt;", "fastest on relu", "4.00x", "not tuned"):
        assert words in text


def test_an_empty_store_has_a_report(run: Run, home: Path) -> None:
    assert "0 subgraphs" in run("report", "--html", home / "empty.html").out
