"""What a step tells the database of a compiled segment: where it is, how long a run takes, how many there were."""

from __future__ import annotations

import functools
import inspect
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import coexec
from coexec.runtime import segments
from coexec.runtime.place import name_of, place_of
from coexec.runtime.versions import State, Version
from coexec.subgraphs.location import private_location
from coexec.subgraphs.segment_cache import SegmentCache
from coexec.subgraphs.store import Store
from tests.subgraphs.samples import key

HERE = Path(__file__).name


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def train_step(self) -> None: ...


def line_of(function: Any) -> str:
    return f"{HERE}:{inspect.getsourcelines(function)[1]}"


def test_a_step_is_called_as_the_user_calls_it_and_is_where_it_is_written() -> None:
    net = Net()
    assert (name_of(net.__call__), place_of(net.__call__)) == ("Net", line_of(Net.forward))
    assert (name_of(net.train_step), place_of(net.train_step)) == ("Net.train_step", line_of(Net.train_step))
    assert place_of(functools.partial(net.train_step)) == line_of(Net.train_step)
    assert place_of(print) == ""


def test_a_block_without_a_name_is_told_by_its_place_alone() -> None:
    named, unnamed = coexec.step("warm up"), coexec.step()
    assert named._runner.where.startswith(f"warm up, {HERE}:")
    assert unnamed._runner.where.startswith(f"{HERE}:")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """What the database was told."""
    found: list[tuple[str, float, int]] = []
    cache = SimpleNamespace(note_runs=lambda *told: found.append(told))
    monkeypatch.setattr(segments, "compile_worker", lambda: SimpleNamespace(cache=cache))
    return found


def version(**native: Any) -> Version:
    facts: dict[str, Any] = {
        "compiled_s": [0.002] * 4,
        "replayed_s": [0.004] * 4,
        "trial": 0,
        "runs": 30,
        "discards": 0,
    }
    made = Version(None, SimpleNamespace(**facts | native), 0, state=State.COMPILED)  # type: ignore[arg-type]
    made.key = "ab" * 32
    return made


def test_runs_are_told_after_the_trial_and_again_when_there_are_ten_times_more(
    told: list[tuple[str, float, int]],
) -> None:
    one = version(trial=3)
    segments._note_runs(one)
    assert told == []
    one.native.trial = 0
    for one.native.runs in (30, 31, 299, 300, 301):
        segments._note_runs(one)
    assert told == [(one.key, 0.002, 30), (one.key, 0.002, 270)]


def test_explain_names_a_compiled_version_as_the_database_does() -> None:
    one = version()
    assert f"`coexec db show {one.key[:16]}`" in one.describe()
    one.state = State.REPLAY
    assert "coexec db show" not in one.describe()


def test_the_store_hears_of_runs_in_the_background(tmp_path: Path) -> None:
    store = Store(private_location(tmp_path / "store"), strict=True)
    store.put_subgraph(key())
    SegmentCache(store, tmp_path / "segments").note_runs(key().digest, 0.002, 30)
    deadline_s = time.monotonic() + 20
    while store.subgraphs()[0].runs != 30 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    (info,) = store.subgraphs()
    assert (info.run_s, info.runs) == (0.002, 30)
