"""The start of a serving process: from a built model to the end of its first optimized call.

    python -m benchmarks.bench_inference --collect --tune --models resnet18 bert      # once, into the same store
    python -m benchmarks.bench_serving_start --models resnet18 bert --json out/bench/serving_start.json

Each sample is a fresh process. `coexec` serves what the store knows and compiles nothing; which backends served is
printed, since a graph that was never tuned would start fast too. `torch.compile` starts with its caches on disk warm:
one process before fills them; the compiler's modules that a process has loaded are in the JSON, and said where coexec
loaded one. Both begin with torch imported and the model built, so that what differs is capture,
compilation or loading, and the call. The whole life of the process is in the JSON. A ratio above 1: coexec is faster.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.bench_inference import SkippedModel, model_names, open_child
from benchmarks.machine import describe_machine, write_result
from benchmarks.paired import bootstrap_interval
from examples.demo.child import ROOT, ChildFailed

COEXEC, COMPILE = "coexec", "torch.compile"
VARIANTS = {COEXEC: "coexec", COMPILE: "inductor"}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=model_names(), default=["resnet18", "bert", "dlrm"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--samples", type=int, default=5, help="fresh processes per side")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--store", type=Path, default=ROOT / "out" / "bench" / "inference_store")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    # One folder for all samples: the second process of a model finds what the first one compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((options.store / "inductor_cache").absolute())
    result: dict[str, Any] = {"machine": describe_machine(), "batch": options.batch, "models": {}}
    print(f"{'model':<22}{'coexec s':>10}{'torch.compile s':>17}{'ratio, 95% interval':>27}")
    for name in options.models:
        result["models"][name] = measure(name, options)
        print_model(name, result["models"][name])
    write_result(options.json, result)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Samples of both sides, alternating."""
    samples: dict[str, list[dict[str, Any]]] = {COEXEC: [], COMPILE: []}
    try:
        start_once(name, COMPILE, options)  # fills the cache on disk
        for number in range(options.samples):
            order = (COEXEC, COMPILE) if number % 2 == 0 else (COMPILE, COEXEC)
            for side in order:
                samples[side].append(start_once(name, side, options))
    except SkippedModel as skipped:
        return {"skipped": str(skipped)}
    except ChildFailed as failure:
        return {"failed": str(failure)}
    ratios = np.asarray([c["first_s"] for c in samples[COMPILE]]) / [c["first_s"] for c in samples[COEXEC]]
    low, high = bootstrap_interval(ratios)
    return {"samples": samples, "ratio": float(np.median(ratios)), "low": low, "high": high, **account(samples[COEXEC])}


def start_once(name: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One fresh process: seconds to the first result, of its whole life, and of processor time with its children's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    with open_child(name, VARIANTS[side], options) as child:
        answer = child.ask("warm", batch=options.batch)
    life_s = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    facts = {"counters": answer.get("counters", {}), "compilers": answer["compilers"]}
    return {"first_s": answer["first_s"], "life_s": life_s, "cpu_s": cpu_s, **facts}


def account(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether coexec really served: how many graphs which backends ran, how many ran eagerly, and what compiled."""
    counts = samples[-1]["counters"]
    served = {k.removeprefix("serve."): n for k, n in counts.items() if k.startswith("serve.")}
    compilers = sorted({name for sample in samples for name in sample["compilers"]})
    not_served = {k: n for k, n in counts.items() if k.startswith("eager.")}
    return {"served": served, "not_served": not_served, "compilers": compilers}


def print_model(name: str, found: dict[str, Any]) -> None:
    """One line of the table."""
    if "samples" not in found:
        print(f"{name:<22}{found.get('skipped') or found.get('failed')}", flush=True)
        return
    mine, theirs = (median(sample["first_s"] for sample in found["samples"][side]) for side in (COEXEC, COMPILE))
    interval = f"{found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"
    words = ", ".join(f"{k} {n}" for k, n in {**found["served"], **found["not_served"]}.items())
    words += f"; COMPILED: {', '.join(found['compilers'])}" if found["compilers"] else ""
    print(f"{name:<22}{mine:10.2f}{theirs:17.2f}{interval:>27}  {words}", flush=True)


if __name__ == "__main__":
    main()
