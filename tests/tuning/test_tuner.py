"""One run over candidates with planted faults: each is blamed, skipped and reported, and the fastest right one wins."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from coexec.config import private_cache_dir
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.store import Store
from coexec.tuning import Progress, TuneReport, TuneSettings, tune
from coexec.tuning.identity import environment_of
from tests.tuning.graphs import climbing, key_of, store_with
from tests.tuning.planted import BEHAVIOURS

QUICK = TuneSettings(
    attempt_s=10.0,
    memory_bytes=2 << 30,
    rounds=(3, 5),
    busy_retries=0,
    threads=1,
    candidates=tuple(f"planted-{name}" for name in BEHAVIOURS),
)


@dataclass(frozen=True)
class Run:
    store: Store
    report: TuneReport
    events: list[Progress]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    store = store_with(tmp_path_factory.mktemp("tuned"), climbing())
    events: list[Progress] = []
    return Run(store, tune(store, QUICK, progress=events.append), events)


@pytest.mark.parametrize(
    ("candidate", "outcome", "word"),
    [
        ("fast", Outcome.OK, "of eager's"),
        ("slow", Outcome.OK, "of eager's"),
        ("wrong", Outcome.WRONG, "off the float64 run"),
        ("wrong-later", Outcome.WRONG, "off the float64 run"),
        ("reuses-memory", Outcome.WRONG, "the memory of what an earlier call had returned"),
        ("writes-input", Outcome.WRONG, "input 0 was written"),
        ("transposed", Outcome.WRONG, "strides"),
        ("draws", Outcome.WRONG, "generator"),
        ("leak", Outcome.MEMORY, "GiB are allowed"),
        ("hang", Outcome.TIMEOUT, "load took more than 10 s"),
        ("segfault", Outcome.CRASH, "SIGSEGV"),
        ("raises", Outcome.ERROR, "ZeroDivisionError: in the middle of a build"),
        ("refuses", Outcome.UNAVAILABLE, "this op is beyond me"),
    ],
)
def test_every_candidate_ends_with_the_outcome_that_blames_it(
    run: Run, candidate: str, outcome: Outcome, word: str
) -> None:
    (attempt,) = [a for a in run.report.graphs[0].attempts if a.candidate == f"planted-{candidate}"]
    assert attempt.outcome is outcome
    assert word in attempt.detail


def test_the_fastest_right_candidate_is_decided_with_its_files(run: Run) -> None:
    (graph,) = run.report.graphs
    assert graph.complete
    assert graph.winner in ("planted-fast", "planted-slow-build")  # the same code
    key = key_of(climbing())
    decision = run.store.lookup(key, environment_of((), 1))
    assert decision is not None
    assert decision.backend == graph.winner
    assert decision.speedup is not None
    assert decision.speedup > 2
    assert [ref.name for ref in decision.artifacts] == ["data.json"]
    assert decision.options["metadata"] == {"made_by": graph.winner}
    folder = run.store.checkout(decision)
    assert folder is not None
    assert (folder / "data.json").exists()


def test_every_attempt_is_a_measurement(run: Run) -> None:
    found = {m.backend: m for m in run.store.measurements(key_of(climbing()).digest)}
    assert set(found) == {f"planted-{name}" for name in BEHAVIOURS if name != "absent"}
    fast, slow = found["planted-fast"], found["planted-slow"]
    assert fast.median_s is not None
    assert slow.median_s is not None
    assert fast.median_s < slow.median_s
    assert fast.eager_s is not None
    assert fast.spread_s is not None
    assert fast.samples >= 3
    assert found["planted-hang"].median_s is None


def test_what_cannot_be_used_is_named_with_the_reason(run: Run) -> None:
    assert dict(run.report.unavailable) == {"planted-absent": "it is not installed"}


def test_progress_tells_every_attempt_and_the_end(run: Run) -> None:
    good = ("fast", "slow", "slow-build")
    usable = [name for name in BEHAVIOURS if name != "absent"]
    tried = [event.candidate for event in run.events if event.stage == "tried"]
    assert tried == [f"planted-{name}" for name in (*(n for n in usable if n not in good), *good)]
    prepared = [event.candidate for event in run.events if event.stage == "prepared"]
    assert prepared == [f"planted-{name}" for name in good]
    assert (run.events[0].stage, run.events[-1].stage) == ("start", "done")
    assert run.events[-1].speedup == run.report.graphs[0].speedup


def test_the_report_is_plain_data(run: Run) -> None:
    import json

    data = json.loads(json.dumps(run.report.as_json()))
    assert data["outcomes"]["crash"] == 1
    assert data["graphs"][0]["winner"] == run.report.graphs[0].winner


def test_a_second_run_tries_nothing_again(run: Run) -> None:
    events: list[Progress] = []
    report = tune(run.store, QUICK, progress=events.append)
    assert [event.stage for event in events] == ["start", "done"]
    assert all(attempt.before for attempt in report.graphs[0].attempts)
    assert report.graphs[0].winner == run.report.graphs[0].winner
    assert len(run.store.measurements(key_of(climbing()).digest)) == len(BEHAVIOURS) - 1


def test_a_new_version_of_a_candidate_is_another_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from coexec.backends.candidates import registry
    from coexec.tuning import identity

    monkeypatch.setenv("PLANTED_VERSION", "2")
    monkeypatch.setenv("PLANTED", "fast refuses")
    registry.candidates.cache_clear()
    identity._backend_versions.cache_clear()
    try:
        assert run.store.lookup(key_of(climbing()), environment_of((), 1)) is None
        report = tune(run.store, QUICK, candidates=("planted-fast", "planted-refuses"))
        assert {(a.candidate, a.before) for a in report.graphs[0].attempts} == {
            ("planted-fast", False), ("planted-refuses", False)
        }  # fmt: skip
        assert run.store.lookup(key_of(climbing()), environment_of((), 1)) is not None
    finally:
        monkeypatch.undo()
        registry.candidates.cache_clear()
        identity._backend_versions.cache_clear()


def test_a_budget_of_nothing_leaves_everything_for_later(tmp_path: Path) -> None:
    store = store_with(tmp_path, climbing())
    report = tune(store, QUICK, budget_s=0.0)
    assert report.out_of_budget
    assert report.graphs[0].out_of_budget
    assert not report.graphs[0].complete
    assert store.decisions() == ()


def test_the_limit_of_one_graph_is_not_the_budget_of_the_run(tmp_path: Path) -> None:
    """Neither leaves time for an attempt; the report tells them apart."""
    store = store_with(tmp_path, climbing(20))
    (graph,) = tune(store, QUICK, per_graph_s=0.5).graphs
    assert (graph.reason, graph.out_of_budget) == ("nothing was tried: the budget was spent", False)
    (graph,) = tune(store, QUICK, budget_s=0.5).graphs
    assert (graph.winner, graph.out_of_budget) == ("", True)


def test_preparing_and_timing_may_be_two_runs(tmp_path: Path) -> None:
    """The first run builds, verifies and commits failures; the second only times, and builds nothing."""
    store = store_with(tmp_path, climbing(32))
    names = ("planted-fast", "planted-slow", "planted-wrong")
    first = tune(store, QUICK, candidates=names, only="prepare").graphs[0]
    assert first.prepared == ("planted-fast", "planted-slow")
    assert {a.candidate: a.outcome for a in first.attempts} == {"planted-wrong": Outcome.WRONG}
    assert not first.complete
    assert tune(store, QUICK, candidates=names, only="prepare").graphs[0].prepared == first.prepared
    events: list[Progress] = []
    second = tune(store, QUICK, candidates=names, only="time", progress=events.append).graphs[0]
    assert {event.stage for event in events} == {"start", "time", "tried", "done"}
    assert (second.winner, second.complete, second.prepared) == ("planted-fast", True, ())
    found = {m.backend: m for m in store.measurements(key_of(climbing(32)).digest)}
    assert set(found) == set(names)
    assert found["planted-fast"].compile_s is not None
    assert tune(store, QUICK, candidates=names, only="time").graphs[0].attempts[0].before


def test_a_damaged_prepared_file_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_CACHE_DIR", str(tmp_path / "cache"))
    store = store_with(tmp_path, climbing(40))
    tune(store, QUICK, candidates=("planted-fast",), only="prepare")
    (file,) = (private_cache_dir("tuning") / "prepared").glob("*/files/data.json")
    file.chmod(0o600)
    file.write_text(file.read_text().replace("60", "61"))
    (graph,) = tune(store, QUICK, candidates=("planted-fast",), only="time").graphs
    assert graph.winner == ""
    assert "nothing is prepared" in graph.reason
    assert tune(store, QUICK, candidates=("planted-fast",)).graphs[0].winner == "planted-fast"


def test_who_dies_in_the_race_ends_alone(tmp_path: Path) -> None:
    """planted-mortal is right, and kills its process after some calls: the others are timed without it."""
    store = store_with(tmp_path, climbing(32))
    (graph,) = tune(store, QUICK, candidates=("planted-slow", "planted-mortal", "planted-fast")).graphs
    outcomes = {a.candidate: a.outcome for a in graph.attempts}
    assert outcomes == {
        "planted-slow": Outcome.OK, "planted-mortal": Outcome.CRASH, "planted-fast": Outcome.OK
    }  # fmt: skip
    assert graph.winner == "planted-fast"


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only='build'.*'prepare'"):
        tune(only="build")


def test_workers_share_the_graphs_and_time_one_at_a_time(tmp_path: Path) -> None:
    programs = [climbing(size) for size in (32, 48, 64)]
    store = store_with(tmp_path, *programs)
    report = tune(store, QUICK, workers=2, candidates=("planted-fast", "planted-slow"))
    assert [graph.winner for graph in report.graphs] == ["planted-fast"] * 3
    assert {d.subgraph for d in store.decisions()} == {key_of(program).digest for program in programs}


def test_two_tuners_do_not_work_on_one_graph(tmp_path: Path) -> None:
    from coexec.tuning.markers import Markers

    store = store_with(tmp_path, climbing())
    digest = key_of(climbing()).digest
    with Markers(store.location.folder / "marks").claimed(f"graph {digest}") as mine:
        assert mine
        report = tune(store, QUICK)
    assert report.graphs[0].reason == "another tuner works on it"


def test_baked_weights_get_a_decision_of_their_own(tmp_path: Path) -> None:
    """The best for these weights, and the best for any: a model with other weights must not get the first."""
    program = climbing(static=True)
    store = store_with(tmp_path, program)
    report = tune(store, QUICK, candidates=("planted-baked", "planted-slow"))
    assert report.graphs[0].winner == "planted-baked"
    by_constants = {bool(d.constants): d.backend for d in store.decisions(key_of(program).digest)}
    assert by_constants == {True: "planted-baked", False: "eager"}


def test_a_damaged_program_concerns_its_graph_alone(tmp_path: Path) -> None:
    store = store_with(tmp_path, climbing(16), climbing(24))
    damage_program(store, key_of(climbing(16)).digest)
    report = tune(store, QUICK, candidates=("planted-fast",))
    by_digest = {graph.subgraph: graph for graph in report.graphs}
    assert "does not match its checksum" in by_digest[key_of(climbing(16)).digest].reason
    assert by_digest[key_of(climbing(24)).digest].winner == "planted-fast"


def test_a_budget_that_is_spent_is_not_what_a_damaged_program_was_left_for(tmp_path: Path) -> None:
    store = store_with(tmp_path, climbing(16))
    damage_program(store, key_of(climbing(16)).digest)

    def spend(event: Progress) -> None:
        if event.stage == "start":
            time.sleep(2.0)

    report = tune(store, QUICK, candidates=("planted-fast",), budget_s=2.0, progress=spend)
    assert report.out_of_budget
    assert "does not match its checksum" in report.graphs[0].reason
    assert not report.graphs[0].out_of_budget


def damage_program(store: Store, digest: str) -> None:
    """Its file is a byte short from now on."""
    path = store.program(digest)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])


def test_limits_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attempt_s=0.*positive"):
        tune(attempt_s=0)
