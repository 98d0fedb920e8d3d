"""What waits for the tuner, and in which order: one truth for `tune`, `db list --undecided`, `db stats`, `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coexec.backends.key import BEGINNING, environment, is_segment
from coexec.subgraphs.entries import Decision, SubgraphInfo
from coexec.subgraphs.key import SubgraphKey, key_of_text
from coexec.subgraphs.location import private_location
from coexec.subgraphs.segment_cache import environment_of_segments
from coexec.subgraphs.store import Store
from coexec.tuning import TuneSettings
from coexec.tuning.identity import environment_of
from coexec.tuning.queue import SHORT_RUN_S, Queue, Tools, queue_here, segment_facts, selected, tools_here
from coexec.tuning.standing import Facts, Standing, Tried, options_digest
from tests.subgraphs.samples import key

THREADS = torch.get_num_threads()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(private_location(tmp_path / "store"), strict=True)


@pytest.fixture(scope="module")
def tools() -> Tools:
    return tools_here()


def stored(store: Store, subgraph: SubgraphKey) -> SubgraphInfo:
    """With something that could be tuned."""
    store.put_subgraph(subgraph, program=b"a program")
    info = store.subgraph(subgraph.digest)
    assert info is not None
    return info


def segment(name: str = "relu", ops: int = 1) -> SubgraphKey:
    """A key as co-execution's segments have them here."""
    here = "".join(f"{entry}: {value}\n" for entry, value in environment().items())
    return key_of_text(f"{BEGINNING}{here}{name}\n", [f"aten::{name}"] * ops)


def compiled(store: Store, info: SubgraphInfo) -> None:
    """As co-execution decides when it has compiled a segment: nothing was tried."""
    here = environment_of_segments()
    store.decide(Decision(info.digest, here.digest, "coexec-segment"), here)


def tried(store: Store, facts: Facts, candidates: Sequence[Tried]) -> None:
    entries: dict[str, Any] = {c.name: {"options": options_digest(c), "outcome": "error"} for c in candidates}
    Standing(facts, tried=entries).decide(store)


def facts_of(info: SubgraphInfo) -> Facts:
    if is_segment(info.text):
        return segment_facts(info, THREADS)
    return Facts(info.digest, info.program, environment_of((), THREADS), "", "", "", THREADS)


def waiting(store: Store) -> list[str]:
    return [info.digest for info in queue_here(store).waiting]


def test_a_segment_that_was_compiled_waits_until_its_variants_were_tried(store: Store, tools: Tools) -> None:
    info = stored(store, segment())
    compiled(store, info)
    assert waiting(store) == [info.digest]
    tried(store, facts_of(info), tools.variants[:-1])
    assert waiting(store) == [info.digest]
    tried(store, facts_of(info), tools.variants)
    assert waiting(store) == []


def test_a_graph_waits_until_every_candidate_of_here_was_tried(store: Store, tools: Tools) -> None:
    info = stored(store, key("relu"))
    assert waiting(store) == [info.digest]
    tried(store, facts_of(info), tools.candidates[1:])
    assert waiting(store) == [info.digest]
    tried(store, facts_of(info), tools.candidates)
    assert waiting(store) == []


def test_a_decision_of_another_machine_is_none_here(store: Store, tools: Tools) -> None:
    info = stored(store, key("relu"))
    elsewhere = Facts(info.digest, info.program, environment_of((), THREADS + 1), "", "", "", THREADS + 1)
    tried(store, elsewhere, tools.candidates)
    assert waiting(store) == [info.digest]


def test_what_cannot_be_tuned_here_does_not_wait(store: Store) -> None:
    store.put_subgraph(key("relu"))  # without a program
    here = segment()
    stored(store, key_of_text(here.text.replace(environment()["torch"], "torch of tomorrow"), ["aten::relu"]))
    assert queue_here(store) == Queue()


def test_an_empty_store_does_not_look_for_backends(store: Store) -> None:
    def never() -> Tools:
        raise AssertionError("nothing waits")

    assert queue_here(store, never).waiting == ()


def test_most_time_first_whatever_was_used_last(store: Store) -> None:
    names = {"often": (1e-3, 100), "long": (0.5, 10), "short": (2e-5, 1000)}
    digests = {name: stored(store, segment(name)).digest for name in names}
    for name, (run_s, runs) in names.items():
        assert store.note_runs(digests[name], run_s, runs)
    assert waiting(store) == [digests[name] for name in ("long", "often", "short")]
    assert [info.digest for info in selected(store, TuneSettings())] == waiting(store)


def test_without_a_time_the_number_of_ops_stands_for_it(store: Store) -> None:
    digests = [stored(store, segment(name, ops)).digest for name, ops in (("few", 2), ("many", 200), ("some", 20))]
    assert waiting(store) == [digests[1], digests[2], digests[0]]
    store.note_runs(digests[0], 0.1, 50)
    assert waiting(store) == [digests[0], digests[1], digests[2]]


def test_runs_of_several_processes_add_up(store: Store) -> None:
    info = stored(store, segment())
    assert (info.run_s, info.runs) == (None, 0)
    store.note_runs(info.digest, 0.002, 10)
    store.note_runs(info.digest, 0.001, 90)
    found = store.subgraph(info.digest)
    assert found is not None
    assert (found.run_s, found.runs) == (0.001, 100)
    assert not store.note_runs("ab" * 32, 0.001, 1)


def test_a_segment_too_short_to_be_measured_is_passed_over_with_the_reason(store: Store) -> None:
    short, long = (stored(store, segment(name)) for name in ("short", "long"))
    store.note_runs(short.digest, 6e-6, 10_000)
    store.note_runs(long.digest, SHORT_RUN_S, 10_000)
    queue = queue_here(store)
    assert [info.digest for info in queue.waiting] == [long.digest]
    assert "one run takes 6.0 us" in queue.passed_over[short.digest]
