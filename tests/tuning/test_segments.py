"""The tuner on a segment of co-execution: variants are blamed or timed against the usual library, and the best serves.

One library is compiled for all of it, and kept between runs of the tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from coexec.backends import variants
from coexec.backends.cache import REFUSED, Artifact, ArtifactCache, Failure
from coexec.backends.key import artifact_key, environment, key_text
from coexec.backends.segment_program import SegmentProgram, observe, write_program
from coexec.config import private_cache_dir
from coexec.subgraphs.entries import Decision, Outcome
from coexec.subgraphs.key import key_of_text
from coexec.subgraphs.location import private_location
from coexec.subgraphs.segment_cache import SegmentCache, environment_of_segments
from coexec.subgraphs.store import Store
from coexec.tuning import Progress, TuneReport, TuneSettings, tune
from coexec.tuning.graph_tuner import Workshop
from coexec.tuning.segment_tuner import SegmentTuning
from tests.backends.conftest import compiled as compiled_fixture
from tests.backends.recording import record
from tests.tuning import planted_variants
from tests.tuning.planted_variants import GARBAGE, PREFIX, climbing_back

pytestmark = pytest.mark.compile

TRIED = ("faster", "slower", "wrong", "crash", "refuses", "absent")
QUICK = TuneSettings(
    attempt_s=60.0, rounds=(3, 5), busy_retries=0, threads=1, candidates=tuple(PREFIX + name for name in TRIED)
)

compiled = compiled_fixture


@dataclass(frozen=True)
class Run:
    folder: Path
    store: Store
    key: str
    report: TuneReport
    events: list[Progress]

    def decision(self) -> Decision:
        (decision,) = self.store.decisions(self.key)
        return decision


@pytest.fixture(scope="module", autouse=True)
def variants_found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with planted_variants.installed(tmp_path_factory.mktemp("variants")):
        yield


@pytest.fixture(scope="module")
def usual(compiled: object, tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    """A folder with the usual library and the segment's program, as the compile worker leaves them."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    segment = record(lambda _: [climbing_back(x)])
    made: Artifact = compiled(segment.spec)  # type: ignore[operator]
    folder = tmp_path_factory.mktemp("usual")
    write_program(SegmentProgram((observe(segment.spec, segment.inputs),)), folder / "program.json")
    cache = ArtifactCache(folder / "segments")
    meta = {"verified": True, "code": made.meta["code"]}
    cache.put(artifact_key(segment.spec), key_text(segment.spec), made.library, meta, folder / "program.json")
    return cache


@pytest.fixture(scope="module")
def key(usual: ArtifactCache) -> str:
    (folder,) = usual.root().glob("*/*")
    return folder.name


@pytest.fixture(scope="module")
def run(usual: ArtifactCache, key: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tuned")
    store = Store(private_location(folder / "store"), strict=True)
    artifact = usual.get(key)
    assert isinstance(artifact, Artifact)
    assert SegmentCache(store, usual.root()).publish(artifact)
    events: list[Progress] = []
    return Run(folder, store, key, tune(store, QUICK, progress=events.append), events)


def copy_of(run: Run, usual: ArtifactCache, folder: Path) -> SegmentCache:
    """A cache of another process whose folder has the usual library."""
    artifact = usual.get(run.key)
    assert isinstance(artifact, Artifact)
    cache = SegmentCache(run.store, folder)
    text = (artifact.library.parent / "key.txt").read_text()
    cache.put(run.key, text, artifact.library, artifact.meta, artifact.library.parent / "program.json")
    return cache


@pytest.mark.parametrize(
    ("variant", "outcome", "word"),
    [
        ("faster", Outcome.OK, "of coexec-segment's"),
        ("slower", Outcome.OK, "of coexec-segment's"),
        ("wrong", Outcome.WRONG, "off the float64 run"),
        ("crash", Outcome.CRASH, "SIGSEGV"),
        ("refuses", Outcome.UNAVAILABLE, "this op is beyond me"),
    ],
)
def test_every_variant_ends_with_the_outcome_that_blames_it(
    run: Run, variant: str, outcome: Outcome, word: str
) -> None:
    (graph,) = run.report.graphs
    (attempt,) = [a for a in graph.attempts if a.candidate == PREFIX + variant]
    assert attempt.outcome is outcome
    assert word in attempt.detail
    assert {m.backend: m.outcome for m in run.store.measurements(run.key)}[PREFIX + variant] is outcome


def test_the_fastest_right_variant_is_decided_under_the_segments_key(run: Run) -> None:
    (graph,) = run.report.graphs
    assert graph.complete
    assert graph.winner == PREFIX + "faster"
    assert run.report.unavailable == {PREFIX + "absent": "not for this machine"}
    decision = run.decision()
    assert decision.backend == PREFIX + "faster"
    assert decision.environment == environment_of_segments().digest
    assert decision.speedup is not None
    assert decision.speedup > 2
    assert [ref.name for ref in decision.artifacts] == [variants.LIBRARY]
    assert run.store.program(run.key) is not None


def test_a_second_run_tries_nothing_again(run: Run) -> None:
    events: list[Progress] = []
    report = tune(run.store, QUICK, progress=events.append)
    assert [event.stage for event in events] == ["start", "done"]
    assert all(attempt.before for attempt in report.graphs[0].attempts)
    assert report.graphs[0].winner == PREFIX + "faster"


def test_another_process_gets_the_tuned_library_with_the_reason_and_is_to_check_it(run: Run, tmp_path: Path) -> None:
    found = SegmentCache(run.store, tmp_path / "empty").get(run.key)
    assert isinstance(found, Artifact)
    assert found.library.read_bytes() == GARBAGE
    assert not found.is_checked
    assert "of coexec-segment's" in found.meta["tuned"]


def test_a_folder_with_the_usual_library_gets_the_tuned_one_once(
    run: Run, usual: ArtifactCache, tmp_path: Path
) -> None:
    cache = copy_of(run, usual, tmp_path / "other")
    for _ in range(2):
        found = cache.get(run.key)
        assert isinstance(found, Artifact)
        assert found.library.read_bytes() == GARBAGE
        assert (found.library.parent / "program.json").exists()
    assert cache.counters["from the store"] == 1


def test_an_altered_library_is_refused_and_the_usual_one_stays(run: Run, usual: ArtifactCache, tmp_path: Path) -> None:
    cache = copy_of(run, usual, tmp_path / "other")
    cache._store = serving = Store(run.store.location)
    path = run.store.open_artifact(run.decision().artifacts[0])
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(GARBAGE.upper())
    try:
        found = cache.get(run.key)
        assert isinstance(found, Artifact)
        assert GARBAGE not in found.library.read_bytes()
        assert found.is_checked
        assert serving.counters()["fault.artifact damaged"] == 1
    finally:
        path.write_bytes(GARBAGE)


def test_a_library_that_was_wrong_on_live_inputs_loses_its_decision(
    run: Run, usual: ArtifactCache, tmp_path: Path
) -> None:
    decision = run.decision()
    cache = copy_of(run, usual, tmp_path / "other")
    tuned = decision.artifacts[0].digest
    cache.put_failure(
        run.key, (next(cache.root().glob("*/*")) / "key.txt").read_text(), "crashed", "it fell", {REFUSED: tuned}
    )
    try:
        assert cache.get(run.key) is None  # the failure was the library's: the usual one is compiled
        assert run.store.decisions(run.key) == ()
        assert cache.counters["wrong on live inputs"] == 1
    finally:
        run.store.decide(decision, environment_of_segments())


def test_where_replay_was_faster_than_every_library_there_is_none(
    run: Run, usual: ArtifactCache, tmp_path: Path
) -> None:
    decision = run.decision()
    replay = Decision(
        run.key, decision.environment, variants.REPLAY, options=decision.options, speedup=1.5, reason="replay: 1.5x"
    )
    run.store.decide(replay, environment_of_segments())
    try:
        found = copy_of(run, usual, tmp_path / "other").get(run.key)
        assert isinstance(found, Failure)
        assert (found.kind, found.reason) == ("slower", "replay: 1.5x")
    finally:
        run.store.decide(decision, environment_of_segments())


def test_a_segment_of_another_environment_is_tuned_there(run: Run) -> None:
    """Its key names the environment: here there is another segment in its place, which nobody has decided."""
    text = run.store.subgraph(run.key)
    assert text is not None
    other = key_of_text(text.text.replace(environment()["torch"], "torch of tomorrow"), ["aten::exp"])
    run.store.put_subgraph(other, program=run.store.program(run.key))
    assert [graph.subgraph for graph in tune(run.store, QUICK).graphs] == [run.key]
    (graph,) = tune(run.store, QUICK, subgraphs=(other.digest,)).graphs
    assert not graph.winner
    assert "another environment" in graph.reason


def test_time_that_is_up_is_called_that_and_not_a_timeout_of_the_library(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "load took more than -2 s": nothing is asked of a child any more."""
    monkeypatch.setattr(SegmentTuning, "left_s", lambda self: -2.0)
    shutil.rmtree(private_cache_dir("tuning") / "prepared", ignore_errors=True)  # the usual library, of an earlier run
    (graph,) = tune(run.store, QUICK, retune=True).graphs
    assert graph.reason == "the budget was spent"
    assert not graph.out_of_budget  # it was the graph's own time
    monkeypatch.setattr(Workshop, "out_of_budget", lambda self: True)
    (graph,) = tune(run.store, QUICK, retune=True).graphs
    assert (graph.reason, graph.out_of_budget) == ("the budget was spent", True)


def test_names_of_graphs_backends_leave_segments_alone(run: Run) -> None:
    assert tune(run.store, QUICK, candidates=("torchscript",)).graphs == ()


def test_a_new_version_of_a_variant_is_tried_against_a_rebuilt_usual_library(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant has taken its place in the store."""
    monkeypatch.setenv("PLANTED_VERSION", "2")
    shutil.rmtree(private_cache_dir("tuning") / "prepared", ignore_errors=True)  # by an earlier run of this test
    events: list[Progress] = []
    name = PREFIX + "slower"
    (graph,) = tune(run.store, QUICK, candidates=(name,), progress=events.append).graphs
    assert [event.stage for event in events if event.candidate == variants.USUAL] == ["build", "verify"]
    assert next(a for a in graph.attempts if a.candidate == name).outcome is Outcome.OK
    assert graph.winner == PREFIX + "faster"  # as it was
