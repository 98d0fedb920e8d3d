"""Inference on the CPU over many models: what choosing a backend per subgraph gains over eager and any one backend.

    python -m benchmarks.bench_inference --json out/bench/inference.json          # collect, tune, serve
    python -m benchmarks.bench_inference --collect --models resnet50 bert
    python -m benchmarks.bench_inference --tune --budget-s 3600
    python -m benchmarks.bench_inference --serve --rounds 15 --json out/bench/inference.json

The experiment of TorchDynamo's 2021 note (1.48x), today. Three steps, each in fresh processes on one store:
`--collect` runs each model once per batch size and stores its graphs; `--tune` is `coexec tune` (run it again and it
goes on); `--serve` times each model by turns in three processes: eager, eager again (what ratio two equal contenders
get here: believe no difference below it) and `torch.compile(model, backend="coexec")`, and checks the results against
eager and float64. The table of single backends is computed from what the tuner measured of each graph.
A model whose package is missing is skipped with the reason; everything else that fails is a failure and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.inference_summary import (
    GraphTimes,
    Means,
    backend_speedup,
    best_single,
    best_speedup,
    graph_times,
    means_of,
)
from benchmarks.machine import describe_machine, write_result
from benchmarks.paired import time_by_turns
from coexec.tuning.machine_load import ForeignLoad
from examples.demo.child import ROOT, AwakeInTurn, Child, ChildFailed

EAGER, EAGER_AGAIN, COEXEC = "eager", "eager again", "coexec"
VARIANTS = {EAGER: "eager", EAGER_AGAIN: "eager", COEXEC: "coexec", "torch.compile": "inductor"}
COLLECTED = "collected.json"
BUSY_CORES = 0.3
"""A case during which others took more of the machine than this says little: it is marked and listed."""


def main() -> None:
    """Runs the chosen steps; all three if none is chosen."""
    options = parse()
    chosen = [step for step in ("collect", "tune", "serve") if getattr(options, step)] or ["collect", "tune", "serve"]
    options.store.mkdir(parents=True, exist_ok=True, mode=0o700)
    result: dict[str, Any] = {"machine": describe_machine(), "batches": options.batches}
    if "collect" in chosen:
        result["collect"] = collect(options)
    if "tune" in chosen:
        result["tune"] = tune(options)
    if "serve" in chosen:
        result["serve"] = serve(options)
        result["summary"] = summary(result["serve"], options)
        print_summary(result["summary"])
    write_result(options.json, result)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for step in ("collect", "tune", "serve"):
        parser.add_argument(f"--{step}", action="store_true")
    parser.add_argument("--models", nargs="+", choices=model_names(), default=model_names(), metavar="MODEL")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--only", choices=("prepare", "time"), help="one part of tuning, see `coexec tune --help`")
    parser.add_argument("--budget-s", type=float, help="for tuning in all; default: no limit")
    parser.add_argument("--per-graph-s", type=float)
    parser.add_argument("--candidates", help="backends to tune with, separated by commas")
    parser.add_argument("--threads", type=int, help="intra-op threads of all children; default: torch's")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", nargs="*", choices=["torch.compile"], default=[], help="time these too")
    parser.add_argument("--store", type=Path, default=ROOT / "out" / "bench" / "inference_store")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args()


def model_names() -> list[str]:
    """All models of the catalog."""
    from benchmarks.models import catalog

    return list(catalog.MODELS)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Where the children's store is, and how many threads they have."""
    threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
    return {"COEXEC_CACHE_DIR": str(options.store.absolute()), **threads}


# Collect and tune ----------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Stores every model's graphs; returns and keeps on disk which ones belong to which model and batch size."""
    file = options.store / COLLECTED
    collected: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in options.models:
        collected[name] = collect_one(name, options)
        file.write_text(json.dumps(collected, indent=1))
        words = {batch: len(graphs) for batch, graphs in collected[name].get("graphs", {}).items()}
        print(f"{name:<22} {collected[name].get('problem') or f'graphs by batch size: {words}'}", flush=True)
    return {name: collected[name] for name in options.models}


def collect_one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model in a fresh process."""
    try:
        with open_child(name, "collect", options) as child:
            return child.ask("collect", batches=options.batches)
    except ChildFailed as failure:
        return {"problem": str(failure)}


def tune(options: argparse.Namespace) -> dict[str, Any]:
    """`coexec tune` on the store, its progress on stderr."""
    words = [sys.executable, "-m", "coexec", "tune", "--json"]
    for option, value in (
        ("--budget", options.budget_s),
        ("--per-graph", options.per_graph_s),
        ("--candidates", options.candidates),
        ("--threads", options.threads),
        ("--only", options.only),
    ):
        words += [option, str(value)] if value is not None else []
    words += graphs_of(options)
    search = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        words, env={**os.environ, **environment(options), "PYTHONPATH": search}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"coexec tune ended with status {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    print(f"tuned for {report['elapsed_s']:.0f} s: {report['outcomes']}, {len(report['graphs'])} graphs")
    return {name: report[name] for name in ("elapsed_s", "outcomes", "unavailable", "out_of_budget")}


def graphs_of(options: argparse.Namespace) -> list[str]:
    """Digests of the graphs that the chosen models have at the chosen batch sizes."""
    file = options.store / COLLECTED
    collected = json.loads(file.read_text()) if file.exists() else {}
    found = [
        collected.get(name, {}).get("graphs", {}).get(str(b), []) for name in options.models for b in options.batches
    ]
    return sorted({digest for graphs in found for digest in graphs})


def open_child(name: str, variant: str, options: argparse.Namespace, title: str = "") -> Child:
    """A fresh process with the model. Errors: ChildFailed, also for a model whose package is missing."""
    child = Child(name, variant, title, environment(options), "benchmarks.inference_child")
    missing = child.ask("ready")["missing"]
    if missing:
        child.close()
        raise SkippedModel(missing)
    return child


class SkippedModel(ChildFailed):
    """A model that cannot be had here."""


# Serve ---------------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Times and checks every model at every batch size; a model that is skipped has no entry but its reason."""
    cases: dict[str, Any] = {}
    print(f"\n{'model':<22}{'batch':>6}{'eager ms':>10}{'A/A':>8}{'coexec, 95% interval':>27}  backends, correctness")
    for name in options.models:
        for batch, case in serve_one(name, options).items():
            cases[f"{name} {batch}"] = {"model": name, "batch": batch, **case}
            print_case(name, batch, case)
    return cases


def serve_one(name: str, options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """One model at all batch sizes, one after the other in the same processes."""
    try:
        with ExitStack() as stack:
            titles = (EAGER, EAGER_AGAIN, COEXEC, *options.beside)
            children = {
                title: stack.enter_context(open_child(name, VARIANTS[title], options, title)) for title in titles
            }
            return {batch: serve_batch(children, batch, options) for batch in options.batches}
    except SkippedModel as skipped:
        return {batch: {"skipped": str(skipped)} for batch in options.batches}
    except ChildFailed as failure:
        return {batch: {"contenders": {}, "problems": {EAGER: str(failure)}} for batch in options.batches}


def serve_batch(children: dict[str, Child], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Warms up, checks and times all contenders. Errors: ChildFailed for eager's."""
    problems: dict[str, str] = {}
    facts = {title: found for title, child in children.items() if (found := warmed(title, child, batch, problems))}
    with ExitStack() as stack:
        contenders = [stack.enter_context(AwakeInTurn(children[title])) for title in facts]
        load = ForeignLoad()
        paired = time_by_turns(contenders, options.rounds).as_json(EAGER)
        found = {title: paired[title] | facts[title] for title in paired}
        return {"contenders": found, "problems": problems, "foreign_cores": load.cores()}


def warmed(title: str, child: Child, batch: int, problems: dict[str, str]) -> dict[str, Any]:
    """What is known of a contender that is warm and checked; {} for one that fails, and its reason in `problems`."""
    try:
        facts = child.ask("warm", batch=batch)
        return facts if VARIANTS[title] == "eager" else facts | child.ask("check", batch=batch)
    except ChildFailed as failure:
        if VARIANTS[title] == "eager":
            raise
        problems[title] = str(failure)
        return {}


def print_case(name: str, batch: int, case: dict[str, Any]) -> None:
    """One line of the table."""
    head = f"{name:<22}{batch:>6}"
    if "skipped" in case:
        print(f"{head}  skipped: {case['skipped']}", flush=True)
        return
    found = case["contenders"]
    if COEXEC not in found:
        print(f"{head}  failed: {'; '.join(case['problems'].values())}", flush=True)
        return
    speedup, again = found[COEXEC]["speedup"], found[EAGER_AGAIN]["speedup"]["median"]
    interval = f"{speedup['median']:.3f}x [{speedup['low']:.3f}, {speedup['high']:.3f}]"
    words = f"{serving(found[COEXEC])}, {'correct' if found[COEXEC]['correct'] else 'WRONG'}"
    if is_busy(case):
        words += f"; the machine was busy ({case['foreign_cores']:.1f} cores)"
    print(f"{head}{found[EAGER]['median_ms']:10.2f}{again:8.3f}{interval:>27}  {words}", flush=True)


def serving(facts: dict[str, Any]) -> str:
    """Which backends serve how many graphs, as coexec counts them."""
    counts = {k.removeprefix("serve."): n for k, n in facts["counters"].items() if k.startswith("serve.")}
    counts |= {k: n for k, n in facts["counters"].items() if k.startswith("eager.")}
    return ", ".join(f"{name} {number}" for name, number in counts.items()) or "eager"


# Summary -------------------------------------------------------------------------------------------------------------


def summary(cases: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Means of what was served, and of each backend alone as the tuner measured it."""
    present = [case for case in cases.values() if "skipped" not in case]
    served = {title: means_of([speedup_of(case, title) for case in present]) for title in (EAGER_AGAIN, COEXEC)}
    served |= {title: means_of([speedup_of(case, title) for case in present]) for title in options.beside}
    times = measured_graphs(present, options)
    names = sorted({name for graphs in times.values() for graph in graphs if graph for name in graph.speedups})
    single = {name: means_of([backend_speedup(graphs, name) for graphs in times.values()]) for name in names}
    per_case = {
        case: {name: backend_speedup(graphs, name) for name in names} | {"best per graph": best_speedup(graphs)}
        for case, graphs in times.items()
    }
    return {
        "served": {title: asdict(means) for title, means in served.items()},
        "single_backends": {name: asdict(means) for name, means in single.items()},
        "best_single": best_single({name: means for name, means in single.items() if name != EAGER}),
        "chosen_as_measured": asdict(means_of([best_speedup(graphs) for graphs in times.values()])),
        "models_by_backend": per_case,
        "models": len({case["model"] for case in present}),
        "wrong": [name for name, case in cases.items() if is_wrong(case)],
        "busy": [name for name, case in cases.items() if is_busy(case)],
        "not_tuned": [name for name, case in cases.items() if is_untuned(case)],
        "below_0.97": [name for name, case in cases.items() if is_slow(case)],
        "skipped": {case["model"]: case["skipped"] for case in cases.values() if "skipped" in case},
        "problems": {name: case["problems"] for name, case in cases.items() if case.get("problems")},
    }


def speedup_of(case: dict[str, Any], title: str) -> float | None:
    """The median speedup over eager; None for a contender that failed or was wrong."""
    entry = case["contenders"].get(title)
    return None if entry is None or entry.get("correct") is False else entry["speedup"]["median"]


def is_wrong(case: dict[str, Any]) -> bool:
    """coexec gave a wrong answer."""
    return case.get("contenders", {}).get(COEXEC, {}).get("correct") is False


def is_busy(case: dict[str, Any]) -> bool:
    """Others took a part of the machine while the case was timed."""
    return bool(case.get("foreign_cores", 0.0) > BUSY_CORES)


def is_untuned(case: dict[str, Any]) -> bool:
    """Some graph ran eagerly only because no decision was found for it."""
    return "eager.not tuned" in case.get("contenders", {}).get(COEXEC, {}).get("counters", {})


def is_slow(case: dict[str, Any]) -> bool:
    """coexec was below 0.97x eager, and its whole interval with it."""
    entry = case.get("contenders", {}).get(COEXEC)
    return entry is not None and entry["speedup"]["median"] < 0.97 and entry["speedup"]["high"] < 1.0


def measured_graphs(cases: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, list[GraphTimes | None]]:
    """Per case, what the tuner measured of each of its graphs."""
    from coexec.subgraphs.location import FOLDER, private_location
    from coexec.subgraphs.store import Store

    store = Store(private_location(options.store.absolute() / FOLDER), strict=True)
    file = options.store / COLLECTED
    collected = json.loads(file.read_text()) if file.exists() else {}
    times: dict[str, list[GraphTimes | None]] = {}
    for case in cases:
        graphs = collected.get(case["model"], {}).get("graphs", {}).get(str(case["batch"]), [])
        times[f"{case['model']} {case['batch']}"] = [
            graph_times([asdict(entry) for entry in store.measurements(digest)]) for digest in graphs
        ]
    return times


def print_summary(found: dict[str, Any]) -> None:
    """The means."""
    print(f"\n{found['models']} models. Geometric means over eager; failures counted as 1.0x, and dropped:")
    print(f"{'served, by turns':<32}{'as 1.0x':>9}{'dropped':>9}{'lowest':>9}{'failed':>9}")
    for title, means in found["served"].items():
        print_means(title, Means(**means))
    print(f"{'from the tuner, per graph':<32}")
    for name, means in sorted(found["single_backends"].items(), key=lambda item: -item[1]["failures_as_one"]):
        print_means(name, Means(**means))
    print_means("the fastest for each graph", Means(**found["chosen_as_measured"]))
    print(f"best single backend: {found['best_single']}")
    for title in ("wrong", "busy", "not_tuned", "below_0.97"):
        print(f"{title.replace('_', ' ')}: {', '.join(found[title]) or 'none'}")
    for name, reason in found["skipped"].items():
        print(f"skipped {name}: {reason}")
    for case, problems in found["problems"].items():
        print(f"failed {case}: {problems}")


def print_means(title: str, means: Means) -> None:
    """One line."""
    print(
        f"  {title:<30}{means.failures_as_one:8.3f}x{means.failures_dropped:8.3f}x{means.lowest:8.3f}x"
        f"{means.failures:>6} / {means.cases}"
    )


if __name__ == "__main__":
    main()
