"""The inference benchmark's steps: what is collected, what a child answers, and what the summary says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_inference as bench
from benchmarks.inference_page import sections
from coexec.subgraphs.entries import Outcome
from coexec.subgraphs.location import FOLDER, private_location
from coexec.subgraphs.store import Store
from tests.subgraphs.samples import HERE, key, measurement


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "store").mkdir(mode=0o700)
    return argparse.Namespace(store=tmp_path / "store", threads=1, batches=[1, 2], beside=[])


def case(model: str, speedup: float, **facts: Any) -> dict[str, Any]:
    def contender(median: float, **more: Any) -> dict[str, Any]:
        interval = {"median": median, "low": median * 0.9, "high": median * 1.02}
        return {"median_ms": 1.0, "speedup": interval, **more}

    served = contender(speedup, **({"correct": True, "counters": {"serve.tvm": 1}} | facts))
    contenders = {"eager": contender(1.0), "eager again": contender(1.0), "coexec": served}
    return {"model": model, "batch": 1, "contenders": contenders, "problems": {}}


def test_the_summary_counts_failures_wrong_and_slow_cases(options: argparse.Namespace) -> None:
    cases = {
        "a 1": case("a", 4.0) | {"foreign_cores": 1.2},
        "b 1": case("b", 9.0, correct=False),
        "c 1": {"model": "c", "batch": 1, "contenders": {}, "problems": {"eager": "it raised"}},
        "d 1": case("d", 0.9, counters={"eager.not tuned": 1}),
        "e 1": {"model": "e", "batch": 1, "skipped": "needs a package"},
    }
    found = bench.summary(cases, options)
    assert found["served"]["coexec"]["failures_as_one"] == pytest.approx((4.0 * 0.9) ** (1 / 4))
    assert found["served"]["coexec"]["failures_dropped"] == pytest.approx((4.0 * 0.9) ** (1 / 2))
    assert (found["served"]["coexec"]["failures"], found["models"]) == (2, 4)
    assert (found["wrong"], found["below_0.97"], found["not_tuned"]) == (["b 1"], ["d 1"], ["d 1"])
    assert found["busy"] == ["a 1"]
    assert found["skipped"] == {"e": "needs a package"}
    assert found["problems"] == {"c 1": {"eager": "it raised"}}


def test_a_line_tells_what_served_and_what_to_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_case("a", 1, case("a", 4.0) | {"foreign_cores": 1.2})
    bench.print_case("b", 1, case("b", 9.0, correct=False) | {"foreign_cores": 0.1})
    busy, wrong = capsys.readouterr().out.splitlines()
    assert "4.000x [3.600, 4.080]  tvm 1, correct; the machine was busy (1.2 cores)" in busy
    assert wrong.endswith("tvm 1, WRONG")


def test_single_backends_come_from_what_the_tuner_measured(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(private_location(options.store / FOLDER), strict=True)
    for name, tvm in (("relu", 0.001), ("tanh", None)):
        store.put_subgraph(key(name))
        outcome = Outcome.OK if tvm else Outcome.CRASH
        store.record_measurement(measurement(key(name), "tvm", outcome=outcome, median_s=tvm, eager_s=0.004), HERE)
        store.record_measurement(measurement(key(name), "openvino", median_s=0.002, eager_s=0.004), HERE)
    graphs = {name: {"graphs": {"1": [key(graph).digest]}} for name, graph in (("a", "relu"), ("b", "tanh"))}
    (options.store / bench.COLLECTED).write_text(json.dumps(graphs))
    found = bench.summary({"a 1": case("a", 3.9), "b 1": case("b", 2.0)}, options)
    assert found["models_by_backend"]["a 1"] == {"tvm": 4.0, "openvino": 2.0, "best per graph": 4.0}
    assert found["single_backends"]["tvm"]["failures"] == 1
    assert found["best_single"] == "openvino", "tvm's failure counts as 1.0x"
    assert found["chosen_as_measured"]["failures_as_one"] == pytest.approx((4.0 * 2.0) ** 0.5)
    bench.print_summary(found)
    assert "best single backend: openvino" in capsys.readouterr().out


def test_only_the_graphs_of_the_chosen_models_are_tuned(options: argparse.Namespace) -> None:
    graphs = {name: {"graphs": {"1": [f"{name}1"], "2": [f"{name}2", f"{name}1"]}} for name in ("a", "b")}
    (options.store / bench.COLLECTED).write_text(json.dumps(graphs))
    options.models = ["b", "c"]
    assert bench.graphs_of(options) == ["b1", "b2"]
    options.batches = [1]
    assert bench.graphs_of(options) == ["b1"]


@pytest.mark.compile
def test_graphs_are_collected_and_found_again_by_a_serving_process(options: argparse.Namespace) -> None:
    collected = bench.collect_one("sac_critic", options)
    graphs = collected["graphs"]
    assert [len(graphs[batch]) for batch in ("1", "2")] == [1, 1]
    assert graphs["1"] != graphs["2"]
    store = Store(private_location(options.store / FOLDER), strict=True)
    assert {info.digest for info in store.subgraphs()} == {graphs["1"][0], graphs["2"][0]}
    assert all(info.program for info in store.subgraphs())
    with bench.open_child("sac_critic", "coexec", options) as child:
        facts = child.ask("warm", batch=2)
        assert facts["counters"]["eager.not tuned"] == 1
        check = child.ask("check", batch=2)
        assert check["correct"]
        assert 0 < check["excess"] <= 0.5, "eager itself: half of what is allowed"
        assert child.run_block(1, 3, one_by_one=False) > 0
    assert len(store.subgraphs()) == 2


def test_a_model_without_its_package_is_skipped(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        def __init__(self, *arguments: object) -> None: ...

        def ask(self, command: str) -> dict[str, str]:
            return {"missing": "needs transformers: pip install transformers"}

        def close(self) -> None: ...

    monkeypatch.setattr(bench, "Child", Lacking)
    reason = {"skipped": "needs transformers: pip install transformers"}
    assert bench.serve_one("bert", options) == {1: reason, 2: reason}


def test_the_page_has_every_case_and_bolds_the_fastest_backend(options: argparse.Namespace) -> None:
    cases = {
        "a 1": case("a", 4.0, excess_of_one_run=1.5),
        "b 1": case("b", 9.0, correct=False),
        "c 1": {"model": "c", "batch": 1, "contenders": {}, "problems": {"eager": "it raised"}},
        "e 1": {"model": "e", "batch": 1, "skipped": "needs a package"},
    }
    summary = bench.summary(cases, options)
    summary["models_by_backend"] = {"a 1": {"eager": 1.0, "tvm": 4.1, "onnxruntime": None, "best per graph": 4.1}}
    machine = dict.fromkeys(("processor", "cores", "capability", "torch", "python", "torch_threads"), "?")
    page = "\n".join(sections({"machine": machine, "batches": [1], "serve": cases, "summary": summary}))
    assert "| a | 1 | 1.00 | 1.00x | 4.00x (3.60 to 4.08) | tvm 1 | yes |" in page
    assert "| b | 1 | 1.00 | 1.00x | 9.00x (8.10 to 9.18) | tvm 1 | **no** |" in page
    assert "| c | 1 | - | - | failed | - | - |" in page
    assert "| a 1 | - | **4.10x** | 4.10x |" in page
    assert "- Wrong results: b 1." in page
    assert "- Skipped e: needs a package" in page
    assert "- Failed c 1: it raised" in page
    assert "not by the one run: a 1." in page
    assert "resnet18" in page.partition("- Not part of this run: ")[2]
