"""`step.timeline(path)`: spans of both runners, named by the user's lines, in a file that Perfetto reads."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from coexec.errors import NothingRecordedError
from tests.coexec.harness import exact
from tests.coexec.programs import batch, labels, mlp, training


def events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in found if e["name"] == "thread_name"} == {"PythonRunner", "GraphRunner"}
    return [e for e in found if e["ph"] == "X"]


def test_a_script_that_draws_runs_with_coexec_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DISABLE", "1")
    step = exact(lambda x: x * 2)
    step(torch.ones(3))
    step.timeline(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}


def test_a_wait_carries_the_line_that_reads_and_lies_inside_its_call(tmp_path: Path) -> None:
    @exact
    def step(x: torch.Tensor) -> float:
        y = x
        for _ in range(20):
            y = y @ x
        return y.sum().item()

    for _ in range(6):
        step(torch.eye(300))
    began_us = time.perf_counter_ns() / 1e3
    step(torch.eye(300))
    ended_us = time.perf_counter_ns() / 1e3
    step.timeline(tmp_path / "t.json")
    found = events(tmp_path / "t.json")
    calls = [e for e in found if e["cat"] == "call"]
    assert len(calls) == step.stats().co_executed
    last = calls[-1]
    assert began_us <= last["ts"] <= last["ts"] + last["dur"] <= ended_us, "the clock is perf_counter's"
    here = [e for e in found if last["ts"] <= e["ts"] < ended_us and e is not last]
    (read,) = [e for e in here if e["tid"] == 1 and e["args"]["reason"] == "fetch"]
    assert f"{Path(__file__).name}:{step.__wrapped__.__code__.co_firstlineno + 5}" in read["name"]
    assert last["ts"] <= read["ts"]
    assert read["ts"] + read["dur"] <= last["ts"] + last["dur"]
    products = [e for e in here if e["tid"] == 2 and e["cat"] in ("op", "replayed") and "aten::mm" in e["name"]]
    assert sum(e["args"]["ops"] for e in here if e["tid"] == 2 and e["cat"] in ("op", "replayed")) >= 21
    assert products
    assert all("test_timeline.py" in e["name"] for e in products)


def test_the_latest_calls_and_no_two_things_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.1))
    step = exact(training(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    for i in range(30):
        step(batch(i), labels(i))
    step.timeline(str(tmp_path / "t.json"))
    found = events(tmp_path / "t.json")
    assert len([e for e in found if e["cat"] == "call"]) == 10
    for category in ({"call"}, {"wait"}, {"wait", "op", "replayed", "segment"}):
        thread = 2 if "op" in category else 1
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == thread and e["cat"] in category)
        assert spans
        assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans)), "at most 1 us of rounding"


def test_a_graph_that_begins_anew_takes_its_numbers_along(tmp_path: Path) -> None:
    """When a loop is folded, nodes get other numbers: spans of calls before that named other ops, or none at all."""
    cell = nn.Linear(4, 4)

    @exact
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        h = x
        for _ in range(n):
            h = cell(h).tanh()
        return h.sum()

    lengths = [12] * 6 + [3, 7, 2, 9, 5, 4, 8, 6, 3, 7]
    for k, n in enumerate(lengths):
        step(torch.ones(2, 4), n)
        if k == 5 or k > 12:
            step.timeline(tmp_path / "t.json")
            calls = [e for e in events(tmp_path / "t.json") if e["cat"] == "call"]
            work = [e for e in events(tmp_path / "t.json") if e["tid"] == 2 and e["ts"] >= calls[-1]["ts"]]
            assert all("test_timeline.py" in e["name"] or "first operation" in e["name"] for e in work)
            assert len(calls) <= step.stats().co_executed
    assert step.stats().loops == 1


def test_the_call_that_is_under_way_is_left_out(tmp_path: Path) -> None:
    """Its spans are being written, by the graph's thread too."""
    seen: list[int] = []

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        if len(seen) >= 6:
            step.timeline(tmp_path / "t.json")
        seen.append(len(events(tmp_path / "t.json")) if len(seen) >= 6 else 0)
        return (x @ x).sum()

    for _ in range(8):
        step(torch.eye(64))
    before = step.stats().co_executed
    calls = [e for e in events(tmp_path / "t.json") if e["cat"] == "call"]
    assert len(calls) == before - 1, "asked by the last call, before it had ended"
    reading, stop = threading.Event(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            step.timeline(tmp_path / "other.json")
            reading.set()

    reader = threading.Thread(target=read)
    reader.start()
    seen.clear()
    for _ in range(200):
        seen.clear()
        step(torch.eye(64))
    assert reading.wait(30)
    stop.set()
    reader.join()
    assert events(tmp_path / "other.json")


def test_without_a_co_executed_call_there_is_nothing_to_draw(tmp_path: Path) -> None:
    step = coexec.compile(lambda x: x + 1)
    with pytest.raises(NothingRecordedError, match="no co-executed call"):
        step.timeline(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_modules_and_blocks_have_it_too(tmp_path: Path) -> None:
    module = coexec.compile(nn.Linear(3, 3))
    for _ in range(6):
        module(torch.ones(2, 3))
    module.timeline(tmp_path / "module.json")
    assert any("aten::" in e["name"] for e in events(tmp_path / "module.json"))
    for _ in range(6):
        with coexec.step() as block:
            (torch.ones(3) * 2).sum().item()
    block.timeline(tmp_path / "block.json")
    assert any("aten::" in e["name"] for e in events(tmp_path / "block.json"))


def test_after_a_call_that_returned_early_its_graph_is_waited_for(tmp_path: Path) -> None:
    step = exact(lambda x: (x @ x).sum(), overlap=True)
    for _ in range(8):
        result = step(torch.eye(400))
    assert step.stats().returned_early > 0
    step(torch.eye(400))
    step.timeline(tmp_path / "t.json")
    last = [e for e in events(tmp_path / "t.json") if e["cat"] == "call"][-1]
    work = [e for e in events(tmp_path / "t.json") if e["tid"] == 2 and e["ts"] >= last["ts"]]
    assert sum(e["args"]["ops"] for e in work if e["cat"] in ("op", "replayed")) >= 2
    assert result.item() == 400
