"""`coexec tune` hands its words to the tuner, and tells what came of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from coexec import tuning
from coexec.cli.app import PROBLEM, USAGE
from coexec.cli.tune import describe, progress_bar, tune
from coexec.subgraphs.entries import Outcome
from coexec.tuning import AttemptReport, GraphReport, Progress, TuneReport, TuneSettings, ray_workers
from tests.cli.conftest import Run

GOOD = GraphReport(
    "ab" * 32, "model.py:31", (AttemptReport("tvm", Outcome.CRASH, "SIGSEGV"),), "onnxruntime", 1.8, True, "fastest"
)
LEFT = GraphReport("cd" * 32, "model.py:40", reason="its program cannot be read")
LATER = GraphReport("ef" * 32, "model.py:50", reason="the budget was spent before its turn", out_of_budget=True)


class PlantedTuner:
    """Takes the tuner's place; remembers what it was asked."""

    def __init__(self, report: TuneReport) -> None:
        self.report, self.asked = report, {}  # type: TuneReport, dict[str, Any]

    def __call__(self, **given: Any) -> TuneReport:
        self.asked = given
        return self.report


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> PlantedTuner:
    planted = PlantedTuner(TuneReport((GOOD,), {"ipex": "needs torch 2.8"}, 3.0))
    monkeypatch.setattr(tuning, "tune", planted)
    return planted


def test_every_option_is_a_limit_of_the_tuner() -> None:
    names = {parameter.name for parameter in tune.params} - {"as_json", "with_ray"}
    assert names <= {field.name for field in dataclasses.fields(TuneSettings)}


def test_the_help_says_the_tuners_own_defaults() -> None:
    """The command leaves them to the tuner; its help must not say others."""
    options = {option.name: option for option in tune.params if isinstance(option, click.Option)}
    named = ("per_graph_s", "attempt_s", "memory_bytes", "workers")
    said = {name: str(options[name].help).rpartition("default: ")[2].rstrip(".") for name in named}
    defaults = {name: options[name].type.convert(word, options[name], None) for name, word in said.items()}
    assert defaults == {name: getattr(TuneSettings(), name) for name in named}
    assert (TuneSettings().budget_s, TuneSettings().only) == (None, "")
    for name, words in {"budget_s": "no limit", "candidates": "all usable ones", "only": "both"}.items():
        assert str(options[name].help).endswith(f"default: {words}.")


def test_words_become_limits(run: Run, tuner: PlantedTuner) -> None:
    words = ("--budget", "10m", "--per-graph", "90", "--memory", "2G", "--candidates", "eager", "--workers", "2")
    assert run("tune", "abcd", *words, "--retune").status == 0
    del tuner.asked["progress"]
    expected = {"budget_s": 600.0, "per_graph_s": 90.0, "memory_bytes": 2 << 30, "candidates": ("eager",)}
    assert tuner.asked == expected | {"workers": 2, "retune": True, "subgraphs": ("abcd",)}


def test_defaults_are_left_to_the_tuner(run: Run, tuner: PlantedTuner) -> None:
    run("tune")
    assert set(tuner.asked) == {"progress", "retune"}
    assert tuner.asked["retune"] is False


def test_ray_gets_the_same_limits(run: Run, tuner: PlantedTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TuneSettings] = []
    monkeypatch.setattr(ray_workers, "tune_with_ray", lambda settings: asked.append(settings) or tuner.report)
    assert run("tune", "--ray", "--budget", "10m").status == 0
    assert asked == [TuneSettings(budget_s=600.0)]


def test_ray_needs_a_store_that_other_machines_reach(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers.importlib.util, "find_spec", lambda name: True)
    answer = run("tune", "--ray")
    assert answer.status == PROBLEM
    assert "COEXEC_STORE" in answer.err


def test_the_result_names_winners_and_what_was_not_tried(run: Run, tuner: PlantedTuner) -> None:
    out = run("tune").out
    for words in ("onnxruntime", "1.80x", "model.py:31", "1 crash", "needs torch 2.8"):
        assert words in out
    document = run("tune", "--json").json()
    assert document["graphs"][0]["attempts"][0]["detail"] == "SIGSEGV"
    assert document["outcomes"] == {"crash": 1}


def test_a_graph_that_cannot_be_tuned_is_a_problem_but_a_spent_budget_is_none(run: Run, tuner: PlantedTuner) -> None:
    tuner.report = TuneReport((GOOD, LEFT), {}, 3.0)
    answer = run("tune")
    assert answer.status == PROBLEM
    assert "its program cannot be read" in answer.out
    tuner.report = TuneReport((GOOD, LATER), {}, 3.0, out_of_budget=True)
    answer = run("tune")
    assert answer.status == 0
    assert "the next `coexec tune` goes on" in answer.out


def test_a_spent_budget_does_not_excuse_what_failed_before(run: Run, tuner: PlantedTuner) -> None:
    tuner.report = TuneReport((GOOD, LEFT, LATER), {}, 3.0, out_of_budget=True)
    answer = run("tune")
    assert answer.status == PROBLEM
    assert "its program cannot be read" in answer.out
    assert [graph["out_of_budget"] for graph in run("tune", "--json").json()["graphs"]] == [False, False, True]


def test_what_is_passed_over_is_no_problem_and_says_why(run: Run, tuner: PlantedTuner) -> None:
    short = dataclasses.replace(LEFT, reason="passed over: one run takes 6.0 us", passed_over=True)
    tuner.report = TuneReport((GOOD, short), {}, 3.0)
    answer = run("tune")
    assert answer.status == 0
    assert "one run takes 6.0 us" in answer.out


def test_an_unknown_backend_is_wrong_usage(run: Run, tuner: PlantedTuner) -> None:
    answer = run("tune", "--candidates", "torchscrip")
    assert answer.status == USAGE
    assert "Did you mean 'torchscript'?" in answer.err
    assert tuner.asked == {}


def test_an_unknown_variant_of_segments_is_told_where_they_are_named(run: Run, tuner: PlantedTuner) -> None:
    answer = run("tune", "--candidates", "coexec-segment-simd128")
    assert answer.status == USAGE
    assert "Did you mean 'coexec-segment-simd256'?" in answer.err
    assert "`coexec doctor` names the backends, docs/design/tuning.md the variants of segments" in answer.err
    assert tuner.asked == {}


def test_variants_of_segments_are_candidates_too(run: Run, tuner: PlantedTuner) -> None:
    assert run("tune", "--candidates", "coexec-segment-fma,eager").status == 0
    assert tuner.asked["candidates"] == ("coexec-segment-fma", "eager")


def test_a_subgraph_that_is_not_stored_is_wrong_usage(run: Run, tuner: PlantedTuner) -> None:
    tuner.report = TuneReport((), {}, 0.1)
    answer = run("tune", "feed")
    assert answer.status == USAGE
    assert "begins with feed" in answer.err
    answer = run("tune", "feed", "--candidates", "onnxruntime")
    assert answer.status == USAGE
    assert "that onnxruntime could run begins with feed" in answer.err


def test_an_empty_store_has_nothing_to_tune(run: Run) -> None:
    answer = run("tune", "--candidates", "eager")
    assert answer.status == 0
    assert "Nothing to tune" in answer.out


def test_no_bar_is_drawn_into_a_pipe() -> None:
    with progress_bar() as listener:
        assert listener is None


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    event = Progress(0, 2, "ab" * 32, "model.py:31", "tvm", "tried", Outcome.OK, 1.5)
    with progress_bar() as listener:
        assert listener is not None
        listener(event)
        listener(dataclasses.replace(event, candidate="", stage="done"))
    captured = capsys.readouterr()
    assert "abababab model.py:31" in captured.err
    assert "1/2" in captured.err
    assert captured.out == ""


def test_an_event_reads_as_a_sentence() -> None:
    event = Progress(0, 2, "ab" * 32, "model.py:31", "tvm", "tried", Outcome.OK, 1.5)
    assert describe(event) == "abababab model.py:31  tvm: ok 1.50x"
    assert describe(dataclasses.replace(event, outcome=None, stage="build", speedup=None)).endswith("tvm: build")
