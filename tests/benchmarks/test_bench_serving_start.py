"""The start of a serving process: it serves what the store knows, and nothing in it compiles."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import bench_serving_start as bench
from benchmarks.bench_inference import collect_one
from coexec.subgraphs.location import FOLDER, private_location
from coexec.subgraphs.store import Store
from tests.choose.decided import decide

MODEL = "sac_critic"


@pytest.mark.compile
def test_a_tuned_process_serves_its_first_call_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "store").mkdir(mode=0o700)
    options = argparse.Namespace(store=tmp_path / "store", threads=1, batch=1, batches=[1], samples=1)
    (digest,) = collect_one(MODEL, options)["graphs"]["1"]
    decide(Store(private_location(options.store / FOLDER), strict=True), digest, "torchscript", threads=1)
    found = bench.measure(MODEL, options)
    assert (found["served"], found["not_served"]) == ({"torchscript": 1}, {})
    assert [sample["compilers"] for sample in found["samples"][bench.COEXEC]] == [[]]
    assert found["samples"][bench.COMPILE][0]["compilers"]
    assert (
        found["ratio"] == found["samples"][bench.COMPILE][0]["first_s"] / found["samples"][bench.COEXEC][0]["first_s"]
    )
    bench.print_model(MODEL, found)
    assert "torchscript 1" in capsys.readouterr().out


def test_a_process_that_compiled_is_said_to_have(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"first_s": 0.5, "counters": {"eager.not tuned": 1}, "compilers": ["torch._inductor.compile_fx"]}
    found = {"ratio": 1.0, "low": 1.0, "high": 1.0, "samples": {bench.COEXEC: [sample], bench.COMPILE: [sample]}}
    bench.print_model("lenet", found | bench.account([sample]))
    assert "COMPILED: torch._inductor.compile_fx" in capsys.readouterr().out
