"""What coexec costs a program that never repeats itself: all steps after the 50th, against plain eager.

    python -m benchmarks.bench_new_paths --json out/bench/new_paths.json

Two programs (benchmarks/new_paths): one draws the order of known operations, one runs code written for each step.
Contenders have a process each and take turns, the same steps for all; nothing is left out of a turn, since what such a
program costs is an iteration that is traced now and then. So the ratio is that of the sums, not of medians, and its
interval comes from resampling the rounds. A second eager process shows what two equals get here. Where a process's
memory happens to lie makes a percent or two for all of its life, so all of it is done with STARTS processes each.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, write_result
from examples.demo.child import Child
from examples.demo.variants import COEXEC, EAGER

PROGRAMS = {"drawn": "benchmarks.new_paths.drawn", "written": "benchmarks.new_paths.written"}
EAGER_AGAIN = "eager again"
VARIANTS = {EAGER: EAGER, EAGER_AGAIN: EAGER, COEXEC: COEXEC}
FIRST_STEPS = 50  # in which coexec may find out
TURN_STEPS = 25
ROUNDS = 60
STARTS = 3
LIMIT = 1.05
RESAMPLES = 4000
NATIVE_TIMEOUT_S = 600.0


def main() -> None:
    """Runs the benchmark; the exit status says whether all programs kept the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "limit": LIMIT, "programs": {}}
    for program in options.programs:
        result["programs"][program] = measure(program, options.rounds, options.starts)
        print_program(program, result["programs"][program])
    write_result(options.json, result)
    if any(entry["contenders"][COEXEC]["ratio"] > LIMIT for entry in result["programs"].values()):
        raise SystemExit(f"coexec cost more than {LIMIT} times eager")


def measure(program: str, rounds: int, starts: int) -> dict[str, Any]:
    """Returns times and ratios of one program, and coexec's account of it."""
    first: dict[str, list[float]] = {name: [] for name in VARIANTS}
    later: dict[str, list[float]] = {name: [] for name in VARIANTS}
    told: list[dict[str, Any]] = []
    for _ in range(starts):
        with ExitStack() as stack:
            children = [stack.enter_context(Child(PROGRAMS[program], VARIANTS[name], name)) for name in VARIANTS]
            for child in children:
                child.ask("wait_native", timeout_s=NATIVE_TIMEOUT_S)
            for seconds, found in (
                (first, turns(children, FIRST_STEPS, 1)),
                (later, turns(children, TURN_STEPS, rounds)),
            ):
                for name in VARIANTS:
                    seconds[name] += found[name]
            told.append(children[-1].ask("stats")["stats"])
    return {
        "contenders": {name: compare(first[name], later[name], first[EAGER], later[EAGER]) for name in VARIANTS},
        "stats": told,
    }


def turns(children: list[Child], steps: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each contender's turns; who begins changes from round to round."""
    seconds: dict[str, list[float]] = {child.name: [] for child in children}
    for number in range(rounds):
        first = number % len(children)
        for child in [*children[first:], *children[:first]]:
            seconds[child.name].append(sum(child.ask("steps", steps=steps)["times_s"]))
    return seconds


def compare(
    first: list[float], later: list[float], eager_first: list[float], eager_later: list[float]
) -> dict[str, Any]:
    """Returns the ratio of the sums with its 95% interval, and the same of the first steps."""
    own, eager = np.asarray(later), np.asarray(eager_later)
    picks = np.random.default_rng(0).integers(0, len(own), size=(RESAMPLES, len(own)))
    low, high = np.quantile(own[picks].sum(1) / eager[picks].sum(1), (0.025, 0.975))
    return {
        "step_ms": float(own.sum()) / (len(own) * TURN_STEPS) * 1e3,
        "ratio": float(own.sum() / eager.sum()),
        "low": float(low),
        "high": float(high),
        "worst_turn": float((own / eager).max()),
        "first_steps_ratio": sum(first) / sum(eager_first),
    }


def print_program(program: str, result: dict[str, Any]) -> None:
    """Prints one program's table."""
    print(f"\n{program:<14}{'ms':>8}{'times eager, 95% interval':>30}{'worst turn':>12}{f'first {FIRST_STEPS}':>10}")
    for name, entry in result["contenders"].items():
        interval = f"{entry['ratio']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"
        print(
            f"{name:<14}{entry['step_ms']:8.3f}{interval:>30}{entry['worst_turn']:12.2f}{entry['first_steps_ratio']:10.2f}"
        )
    for stats in result["stats"]:
        print(
            f"  {stats['phase']}: {stats['iterations']} iterations, {stats['traced']} traced, "
            f"{stats['co_executed']} co-executed, fallbacks {stats['fallbacks']}"
        )


if __name__ == "__main__":
    main()
