"""Where eager raises for an index, so does a graph that another backend serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coexec import choose
from coexec.backends.candidates import registry
from coexec.backends.candidates.candidate import CandidateError, raises_on_indices
from coexec.subgraphs.store import Store
from coexec.tuning.graph_subject import GraphSubject
from coexec.tuning.program_file import load_program
from tests.choose.decided import decide
from tests.choose.test_dynamo_backend import compiled, tuned
from tests.tuning.planted import STEPS

ROWS = STEPS
BAD = (-1, ROWS, 5000)
OUTSIDE = "eager.index out of range"
IDS = torch.tensor([[0, 3, ROWS - 1], [2, 2, 1]])


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 8)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids[:, 1:]) * 2.0


class Doubled(Words):
    """The index is computed in the graph."""

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids * 2) * 2.0


class Halved(Words):
    """The index is computed through floats."""

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table((ids / 2).long()) * 2.0


class Fields(Words):
    """One table for all fields, each with its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(3) * (ROWS // 3))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids + self.offsets) * 2.0


@pytest.fixture(autouse=True)
def without_grad() -> Any:
    with torch.no_grad():
        yield


def with_value(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 1] = value
    return ids


def raises_as_eager(run: Callable[..., Any], module: torch.nn.Module, value: int) -> None:
    with pytest.raises(IndexError) as expected:
        module(with_value(value))
    with pytest.raises(IndexError) as found:
        run(with_value(value))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("candidate", [
    "planted-wraps",
    pytest.param("openvino", marks=pytest.mark.compile),
    pytest.param("aotinductor", marks=pytest.mark.compile),
])  # fmt: skip
def test_an_index_out_of_range_raises_as_in_eager_and_the_candidate_serves_on(store: Store, candidate: str) -> None:
    if not registry.get(candidate).availability().usable:
        pytest.skip(f"{candidate} is not installed")
    module = Words()
    tuned(store, candidate, module, IDS)
    run = compiled(module)
    assert torch.allclose(run(IDS), module(IDS))
    for value in BAD:
        raises_as_eager(run, module, value)
    assert torch.allclose(run(with_value(5)), module(with_value(5)))
    assert choose.counters() == {f"serve.{candidate}": 1, OUTSIDE: len(BAD)}
    assert choose.explain().count(OUTSIDE) == 1
    assert f"and must be in [0, {ROWS})" in choose.explain()


@pytest.mark.parametrize("name", [n for n, c in registry.candidates().items() if raises_on_indices(c)])
@pytest.mark.parametrize("kind", [Words, Doubled])
def test_what_runs_torchs_kernels_raises_by_itself(store: Store, name: str, kind: type[Words]) -> None:
    module = kind()
    tuned(store, name, module, IDS // 2)
    run = compiled(module)
    for ids in [IDS // 2] * 3:  # TorchScript specializes its graph at the first calls
        assert torch.allclose(run(ids), module(ids))
    for value in BAD:
        raises_as_eager(run, module, value)
    assert choose.counters().keys() <= {f"serve.{name}", "eager.fastest"}


@pytest.mark.parametrize("kind", [Doubled, Fields])
@pytest.mark.parametrize("candidate", ["planted-wraps", pytest.param("openvino", marks=pytest.mark.compile)])
def test_an_index_that_the_graph_computes_is_computed_before_the_call(
    store: Store, tmp_path: Path, candidate: str, kind: type[Words]
) -> None:
    if not registry.get(candidate).availability().usable:
        pytest.skip(f"{candidate} is not installed")
    module, good = kind(), IDS % 8
    tuned(store, candidate, module, good)
    run = compiled(module)
    assert torch.allclose(run(good), module(good))
    for value in BAD:
        raises_as_eager(run, module, value)
    assert torch.allclose(run(good + 1), module(good + 1))
    assert choose.counters() == {f"serve.{candidate}": 1, OUTSIDE: len(BAD)}
    assert "computed index 0 holds" in choose.explain()
    path = store.program(store.subgraphs()[0].digest)
    assert path is not None
    subject = GraphSubject(load_program(path))  # the tuner tries it too
    metadata = subject.build(candidate, tmp_path, torch.get_num_threads(), 60.0)
    subject.load(candidate, tmp_path, metadata, torch.get_num_threads())
    subject.call()


def test_a_candidate_that_may_not_raise_never_gets_an_index_that_is_computed_through_floats(
    store: Store, tmp_path: Path
) -> None:
    module = Halved()
    tuned(store, "planted-wraps", module, IDS)
    run = compiled(module)
    assert torch.equal(run(IDS), module(IDS))
    assert choose.counters() == {"eager.index unknown": 1}
    assert "planted-wraps: the graph itself computes an index (embedding)" in choose.explain()
    raises_as_eager(run, module, ROWS * 2)
    path = store.program(store.subgraphs()[0].digest)
    assert path is not None
    with pytest.raises(CandidateError, match="computes an index"):  # nor does the tuner try it
        GraphSubject(load_program(path)).build("planted-wraps", tmp_path, torch.get_num_threads(), 10.0)


def test_a_first_call_that_eager_rejects_decides_nothing(store: Store) -> None:
    module = Words()
    run = compiled(module)
    raises_as_eager(run, module, ROWS)
    assert len(store.subgraphs()) == 0
    run(IDS)
    (info,) = store.subgraphs()
    decide(store, info.digest, "planted-wraps")
    run = compiled(module)
    raises_as_eager(run, module, ROWS)
    assert torch.equal(run(IDS), module(IDS))
    assert choose.counters()["serve.planted-wraps"] == 1
    assert choose.counters()[OUTSIDE] == 2


def test_a_training_step_looks_at_its_indices_too(store: Store) -> None:
    module = Words()
    with torch.enable_grad():
        tuned(store, "planted-wraps", module, IDS)
        run = compiled(module)
        run(IDS).sum().backward()
        assert choose.counters() == {"serve.planted-wraps": 2}
        raises_as_eager(run, module, ROWS)
        assert choose.counters()[OUTSIDE] == 1
