"""The contest: what it computes from what it measured, what it renders, and a whole small run."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import benchmarks.contest.__main__ as contest
from benchmarks.contest import timeline
from benchmarks.contest.__main__ import main
from benchmarks.contest.budget import FEWEST_ROUNDS, STARTS, UNLIMITED, Budget
from benchmarks.contest.child import ASK_EVERY, QUIET_STEPS, QUIET_STEPS_KEPT, Worker, parameters_of, waits_by_reason
from benchmarks.contest.contenders import CONTENDERS, DISTURBED, EAGER
from benchmarks.contest.converting import difference, exported, frozen, reason, scripted, traced, train, verdict
from benchmarks.contest.measure import by_importance, distance, first_fast_s, per_step
from benchmarks.contest.page import best_compile, co_executed_verdict, write_page
from benchmarks.programs.program import Program


def test_the_first_fast_step_begins_a_window_of_fast_ones() -> None:
    times_s = [9.0, 0.1, 9.0, 0.1, 0.1, 0.1, 0.1, 0.1]
    warm = {"times_s": times_s, "ends_s": list(np.cumsum(times_s))}
    assert first_fast_s(warm, 0.1) == pytest.approx(9.1), "of steps 2 to 6 most are fast"
    assert first_fast_s({"times_s": [9.0] * 8, "ends_s": list(range(8))}, 0.1) is None


def test_distance_is_relative_to_the_way_that_eager_has_come() -> None:
    eager = np.array([[0.0, 0.0], [3.0, 4.0]])
    assert distance(eager, eager) == 0.0
    assert distance(np.array([[0.0, 0.0], [3.0, 4.5]]), eager) == pytest.approx(0.1)


def test_accounts_are_differences_per_step() -> None:
    zero = dict.fromkeys(("python_exec_s", "python_stall_s", "graph_exec_s", "graph_stall_s"), 1.0)
    zero |= dict.fromkeys(("feeds", "fetches", "co_executed"), 10)
    later = {name: value + 4 for name, value in zero.items()}
    waits = {"fetch": {"count": 12}, "sync": {"count": 8, "seconds": 0.4}}
    before = {"stats": zero, "waits": {"fetch": {"count": 4}}}
    found = per_step(before, {"stats": later, "waits": waits}, 4)
    assert (found["python_exec_ms"], found["fetches"]) == (1000.0, 1.0)
    assert found["waits"] == {"fetch": {"count": 2.0}, "sync": {"count": 2.0, "seconds": 0.1}}


def test_waits_of_several_places_are_added_up_by_reason() -> None:
    places = [SimpleNamespace(reason=r, count=c, seconds=s) for r, c, s in (("fetch", 1, 0.5), ("fetch", 2, 0.25))]
    assert waits_by_reason(places) == {"fetch": {"count": 3, "seconds": 0.75}}
    assert waits_by_reason({"sync": 2}) == {"sync": {"count": 2}}


class Remembers(nn.Module):
    """What no converter notices: an attribute of Python that the forward pass writes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * float(self.calls)


def remembering() -> Program:
    torch.manual_seed(0)
    model = Remembers()
    losses: list[float] = []

    def step(x: Tensor) -> Tensor:
        losses.append(model(x).sum().item())
        return torch.tensor(losses[-1])

    return Program(step, iter([torch.ones(1, 2)] * 20), {"model": model}, {}, {"losses": losses})


def test_a_trace_that_bakes_an_attribute_in_is_found_to_be_wrong() -> None:
    eager, baked = train(remembering(), lambda program: program.step), train(remembering(), traced)
    assert difference(eager[0], baked[0], "loss") == ""
    assert difference(eager[1], baked[1], "loss").startswith("loss is ")


def trained_net() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = iter(torch.rand(20, 3, 2, generator=torch.Generator().manual_seed(1)))
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, {"buffers": dict(model.named_buffers())})


@pytest.mark.filterwarnings("ignore")  # of the tracer and of TorchScript, which say that they are old
@pytest.mark.parametrize("way", [exported, scripted, traced])
def test_what_is_converted_trains_the_models_own_parameters_and_buffers(way: Any) -> None:
    program = trained_net()
    before = parameters_of(program)
    reference = train(trained_net(), lambda program: program.step)
    assert difference(reference, train(program, way), "loss") == ""
    assert not np.array_equal(before, parameters_of(program))


@pytest.mark.filterwarnings("ignore")
def test_verdicts_name_the_line_of_the_program() -> None:
    found = verdict("bert_cls", "jit.script model")
    assert found["verdict"] == "no"
    assert "(bert.py:" in found["why"]
    path = Path("x") / "site-packages" / "sklearn"
    text = f"Bad thing\n  Explanation: skipped in /{path}/a.py\nfrom user code:\n File '/a/b.py', line 3"
    assert reason(RuntimeError(text)) == "RuntimeError: skipped in sklearn/a.py"


def test_logs_are_compared_by_value() -> None:
    log = {"a": [1.0, torch.ones(2)], "b": (1, "x", None)}
    assert difference(frozen(log), frozen(log), "log") == ""
    assert difference(frozen(log), frozen(log | {"a": [1.0, torch.zeros(2)]}), "log") == "a is 0, eager's is 1"
    assert difference([1.0], [1.0, 2.0], "log")
    assert difference({"a": 1}, {"b": 1}, "log")


def contender(speedup: float, **more: Any) -> dict[str, Any]:
    ratio = {"median": speedup, "low": speedup * 0.9, "high": speedup * 1.1}
    return {"median_ms": 10 / speedup, "speedup": ratio, "peak_bytes": 100, "first_fast_s": 2.0, **more}


def sample_result() -> dict[str, Any]:
    stats = {"segments": {"replay": 3}, "fallbacks": {"new path": 2}, "phase": "co-execution"}
    stats |= {"iterations": 200, "co_executed": 190, "traced": 8, "switches": 1, "loops": 4}
    waits = {"fetch": {"count": 2.0, "seconds": 0.001}}
    times = dict.fromkeys(("python_exec_ms", "python_stall_ms", "graph_exec_ms", "graph_stall_ms"), 1.5)
    spent = {**times, "feeds": 1.0, "fetches": 2.0, "co_executed": 1.0, "waits": waits}
    ours = {"coexec": {"stats": stats}, "per_step": spent}
    dynamo = {"graphs": 3, "graph_breaks": 1, "recompiles": 2}
    contenders = {
        EAGER: contender(1.0),
        "compile": contender(1.2, dynamo=dynamo),
        "compile dynamic": contender(1.4, dynamo=dynamo),
        "coexec": contender(1.5, **ours),
        "coexec kept": contender(1.5, **ours),
        "coexec lazy": contender(0.75, **ours),
        "coexec replay": contender(1.1, **ours),
    }
    entry = {
        "contenders": contenders,
        "distances": {EAGER: 0.0, DISTURBED: 1e-4, "coexec replay": 0.0},
        "losses": {EAGER: [1.0], "coexec replay": [1.0]},
        "problems": {"compile nested": "gpt2, compile nested: it broke"},
        "conversions": {"jit.trace model": {"verdict": "wrong", "why": "step 2: loss is 1"}},
    }
    machine = {"processor": "a | b", "cores": 2, "capability": "AVX2", "torch": "2", "python": "3", "torch_threads": 2}
    plan = {"warm_steps": 100, "rounds": 10, "turn_steps": 10, "tiny": True, "budget_s": 2400.0}
    plan["settle_s"] = 300.0
    programs = {"gpt2": entry, "lora": {"missing": "needs transformers"}}
    return {"began": "today", "machine": machine | {"load_average": [0.1]}, "plan": plan, "programs": programs}


def test_the_page_has_every_figure_and_its_charts(tmp_path: Path) -> None:
    result = sample_result()
    assert best_compile(result["programs"]["gpt2"]) == "compile dynamic"
    write_page(json.loads(json.dumps(result)), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    for words in (
        "1.40x [1.26, 1.54] (compile dynamic)",
        "yes, bit-identical (co-execution)",
        "- gpt2, jit.trace model: wrong: `step 2: loss is 1`",
        "| gpt2 | 1.50x [1.35, 1.65] | 0.75x [0.68, 0.83] | 2.00x |",
        "3 graphs, 1 breaks, 2 recompilations",
        "fetch 2.0 (1.00 ms)",
        "these figures say nothing about speed",
        "All of it had 40 minutes",
        "Not part of this run: resnet50, ",
        "every batch has another length, as texts do.",
        "- converts, wrong: jit.trace model; jit.trace model: `step 2: loss is 1`",
        "- coexec kept: 190 of 200 steps co-executed, 8 traced; fallbacks: 2 new path; 1 branches, 4 loops",
        "gpt2, compile nested: it broke",
        "- lora: needs transformers",
    ):
        assert words in text
    for picture in ("speed", "breakdown"):
        assert f"](page/{picture}.svg)" in text
        assert (tmp_path / "page" / f"{picture}.svg").read_text().startswith("<?xml")


def test_a_budget_is_shared_out_and_never_cuts_the_fewest_rounds() -> None:
    spent = Budget(10.0, time.monotonic() - 8.0)
    assert spent.left_s(STARTS) == 0.0
    assert 1.5 < spent.left_s() <= 2.0
    assert spent.allows_round(20)
    over = Budget(10.0, time.monotonic() - 11.0)
    assert [over.allows_round(number) for number in (0, FEWEST_ROUNDS - 1, FEWEST_ROUNDS)] == [True, True, False]
    assert over.settle_s(300.0) == 2.0
    assert UNLIMITED.settle_s(300.0) == 300.0
    assert UNLIMITED.left_s(0.1) == math.inf


def test_the_contenders_that_matter_most_start_first() -> None:
    order = by_importance(["compile dynamic", "compile", "coexec replay", "coexec", "eager again"])
    assert order == [EAGER, DISTURBED, "eager again", "coexec", "compile", "coexec replay", "compile dynamic"]


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def entry_of(name: str, *_: Any) -> dict[str, Any]:
        asked.append(name)
        if asked == ["dcgan", "gpt2"]:
            raise KeyboardInterrupt
        return {"failed": f"{name} {len(asked)}", "conversions": {}}

    monkeypatch.setattr(contest, "entry_of", entry_of)
    words = ["dcgan", "gpt2", "moe", "--out", str(tmp_path / "run.json")]
    with pytest.raises(KeyboardInterrupt):
        main(words)
    main([*words, "--resume", "--budget", "60"])
    assert asked == ["dcgan", "gpt2", "gpt2", "moe"]
    result = json.loads((tmp_path / "run.json").read_text())
    assert [entry["failed"] for entry in result["programs"].values()] == ["dcgan 1", "gpt2 3", "moe 4"]
    assert len(result["resumed"]) == 1
    main(["moe", *words[3:], "--resume"])
    assert list(json.loads((tmp_path / "run.json").read_text())["programs"]) == ["dcgan", "gpt2", "moe"], "none is lost"
    main([*words, "--resume", "--rounds", "3"])
    assert asked[4:] == ["dcgan", "gpt2", "moe"]
    assert "run.json is begun anew: plan changed since" in capsys.readouterr().err
    monkeypatch.setattr(contest, "digest_of_code", lambda: "another")
    main([*words, "--resume", "--rounds", "3"])
    assert asked[7:] == ["dcgan", "gpt2", "moe"]


def test_conversions_can_be_found_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "measure", lambda name, *_: {"failed": f"{name} is measured"})
    monkeypatch.setattr(contest, "convert", lambda name, budget: {"a way": {"verdict": "yes", "why": ""}})
    words = ["moe", "dcgan", "--out", str(tmp_path / "run.json"), "--no-convert"]
    main(words)
    monkeypatch.setattr(contest, "measure", None)  # not once more
    main([*words[:-1], "--resume"])
    programs = json.loads((tmp_path / "run.json").read_text())["programs"]
    assert list(programs) == ["dcgan", "moe"], "in the catalog's order"
    for name, entry in programs.items():
        assert entry["failed"] == f"{name} is measured"
        assert list(entry["conversions"]) == ["a way"]


def settled(after: int, monkeypatch: pytest.MonkeyPatch, quiet: int = QUIET_STEPS) -> tuple[int, list[float]]:
    """The steps until a contender has settled whose segments change last in step `after`; its waits for compilation."""
    worker, waits = Worker.__new__(Worker), []
    worker.ours, worker.quiet_steps, ran = True, quiet, []
    monkeypatch.setattr(worker, "_run", lambda steps: (ran.extend([0.0] * steps), ([0.0] * steps, [0.0] * steps))[1])
    monkeypatch.setattr(worker, "_settings", lambda: min(len(ran), after))
    worker.step = SimpleNamespace(wait_compiled=lambda limit_s: waits.append(limit_s) or True)
    assert len(worker.do_settle(limit_s=60.0)["times_s"]) == len(ran)
    return len(ran), [limit_s for limit_s in waits if limit_s]


def test_what_has_settled_is_not_run_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled(0, monkeypatch) == (QUIET_STEPS, [])
    assert settled(2 * ASK_EVERY, monkeypatch) == (QUIET_STEPS + 2 * ASK_EVERY, [])
    assert settled(ASK_EVERY, monkeypatch, QUIET_STEPS_KEPT) == (QUIET_STEPS_KEPT + ASK_EVERY, [])


def test_a_page_of_a_small_run_shows_what_ran(tmp_path: Path) -> None:
    result = sample_result()
    entry = result["programs"]["gpt2"]
    entry["contenders"] = {name: entry["contenders"][name] for name in (EAGER, "compile", "coexec")}
    entry["distances"] = {EAGER: 0.0, DISTURBED: 1e-4, "coexec": 1e-5}
    result["plan"]["rounds"] = 2
    write_page(result, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| program | eager | compile | coexec | best torch.compile |" in " ".join(text.split(" "))
    assert "runs (co-execution)" in text, "its verdict, though nobody compared bits"
    assert "| gpt2 | coexec | 100% |" in text, "where the time goes"
    assert "With 2 rounds an interval says little." in text
    assert "## Lazy evaluation" not in text


def test_a_result_that_is_not_bit_identical_is_called_wrong(tmp_path: Path) -> None:
    result = sample_result()
    entry = result["programs"]["gpt2"]
    entry["losses"]["coexec replay"] = [1.0000001]
    entry["distances"]["coexec replay"] = 1e-5
    assert co_executed_verdict(entry) == "WRONG (co-execution)"
    entry["losses"]["eager again"], entry["distances"]["eager again"] = [1.0000002], 2e-5
    assert co_executed_verdict(entry) == "yes, as close as eager to itself (co-execution)"
    del entry["losses"]["eager again"]
    write_page(result, tmp_path / "page.md")
    assert "WRONG (co-execution)" in (tmp_path / "page.md").read_text()


def test_the_timeline_names_its_threads_and_counts_per_step(tmp_path: Path) -> None:
    pid = os.getpid()
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}
    step = {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 5, "dur": 9, "tid": pid}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [op | {"tid": pid}, op | {"tid": 7}, step]}))
    seen = timeline.annotate(path, [dict.fromkeys(timeline.TIMES, 1.0), dict.fromkeys(timeline.TIMES, 1.5)])
    assert seen == {"ops": {"PythonRunner": 1, "GraphRunner": 1}, "steps": 1}
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"PythonRunner", "GraphRunner"}
    assert [e["args"]["python_stall"] for e in events if e["ph"] == "C"] == [500.0]


@pytest.mark.slow
def test_a_whole_run_and_a_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--tiny", "--warm-steps", "8", "--settle", "3", "--out", str(tmp_path / "run.json")]
    run = ["dcgan", "--no-convert", "--rounds", "2", "--turn-steps", "2", "--contenders", "coexec replay"]
    assert main([*run, *words, "--page", str(tmp_path / "run.md")]) == 0
    entry = json.loads((tmp_path / "run.json").read_text())["programs"]["dcgan"]
    assert entry["problems"] == {}
    assert set(entry["contenders"]) == {EAGER, "coexec replay"}
    assert entry["distances"]["coexec replay"] == 0.0
    assert 0.0 < entry["distances"][DISTURBED] < 0.1
    spent = entry["contenders"]["coexec replay"]["per_step"]
    assert (spent["co_executed"], spent["fetches"]) == (1.0, 5.0)
    assert spent["waits"]["step end"]["count"] == pytest.approx(1.0)
    assert "yes, bit-identical (co-execution)" in (tmp_path / "run.md").read_text()
    assert main(["--profile", "dcgan", *words]) == 0
    events = json.loads((tmp_path / "dcgan.trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"PythonRunner", "GraphRunner"} <= names


def test_a_program_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["resnet"], ["--profile", "resnet"], ["--contenders", "magic"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("Error: there is no 'resnet'; there are ") for line in lines] == [True, True, False]
    assert "magic" in lines[2]
    assert "coexec replay" in CONTENDERS
