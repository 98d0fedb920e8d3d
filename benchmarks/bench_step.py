"""Whole training steps, each contender in a process of its own, by turns: eager, torch.compile and coexec.

    python -m benchmarks.bench_step --programs gpt digits mlp --json out/bench/step.json

torch.compile is run twice, on the model alone and on model and optimizer; the better one is what coexec is compared
with. A second eager process shows what ratio two equal contenders get here (A/A): believe no difference below it.
Memory is the highest resident memory of the process over 20 steps, after warm-up.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, write_result
from benchmarks.paired import Paired, time_by_turns
from examples.demo.child import Child, ChildFailed
from examples.demo.variants import COEXEC, EAGER, TORCH_COMPILE, TORCH_COMPILE_MODEL

PROGRAMS = {"gpt": "gpt", "digits": "digits", "mlp": "benchmarks.mlp"}
EAGER_AGAIN = "eager again"
VARIANTS = {
    EAGER: EAGER,
    EAGER_AGAIN: EAGER,
    TORCH_COMPILE_MODEL: TORCH_COMPILE_MODEL,
    TORCH_COMPILE: TORCH_COMPILE,
    COEXEC: COEXEC,
}
WARM_STEPS = 40
PEAK_STEPS = 20
COMPILE_TIMEOUT_S = 600.0


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    names = list(dict.fromkeys([EAGER, *options.variants]))
    result: dict[str, Any] = {"machine": describe_machine(), "programs": {}}
    for program in options.programs:
        result["programs"][program] = measure(program, names, options.rounds)
        print_program(program, result["programs"][program])
    write_result(options.json, result)


def measure(program: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Returns times, ratios, memory and coexec's own account of one program."""
    with ExitStack() as stack:
        children, problems = open_children(stack, program, names)
        paired = time_by_turns(children, rounds)
        facts = {child.name: facts_of(child) for child in children}
    times = paired.as_json(EAGER)
    result = {name: times[name] | facts[name] for name in times}
    for name in result:
        result[name]["peak_ratio"] = facts[name]["peak_bytes"] / facts[EAGER]["peak_bytes"]
    return {"contenders": result, "problems": problems, **against_torch_compile(paired)}


def open_children(stack: ExitStack, program: str, names: list[str]) -> tuple[list[Child], dict[str, str]]:
    """Starts and warms up one child per name, one after the other; those that fail are left out with their reason."""
    children, problems = [], {}
    for name in names:
        print(f"{program}: warming up {name} ...", flush=True)
        try:
            child = stack.enter_context(Child(PROGRAMS[program], VARIANTS[name], name))
            child.ask("warm", steps=WARM_STEPS, timeout_s=COMPILE_TIMEOUT_S)
        except ChildFailed as error:
            if name == EAGER:
                raise
            problems[name] = str(error)
        else:
            children.append(child)
    return children, problems


def facts_of(child: Child) -> dict[str, Any]:
    """Returns memory, and coexec's statistics if it is one of coexec's."""
    return {**child.ask("peak", steps=PEAK_STEPS), **child.ask("stats")}


def against_torch_compile(paired: Paired) -> dict[str, Any]:
    """Returns how coexec compares with the better of the two ways of torch.compile."""
    compiled = [name for name in (TORCH_COMPILE, TORCH_COMPILE_MODEL) if name in paired.seconds]
    if COEXEC not in paired.seconds or not compiled:
        return {}
    best = min(compiled, key=paired.median_s)
    ratio = paired.ratio(COEXEC, best)
    return {"against_torch_compile": {"best": best, "median": ratio.median, "low": ratio.low, "high": ratio.high}}


def print_program(program: str, result: dict[str, Any]) -> None:
    """Prints one program's table."""
    print(f"\n{program:<24}{'ms':>9}{'against eager, 95% interval':>34}{'peak MiB':>10}{'ratio':>7}")
    for name, entry in result["contenders"].items():
        speedup = entry["speedup"]
        interval = f"{speedup['median']:.3f}x [{speedup['low']:.3f}, {speedup['high']:.3f}]"
        print(
            f"{name:<24}{entry['median_ms']:9.2f}{interval:>34}"
            f"{entry['peak_bytes'] / 2**20:10.0f}{entry['peak_ratio']:7.3f}"
        )
        if "stats" in entry:
            stats = entry["stats"]
            print(f"  {stats['phase']}; segments {stats['segments']}; fallbacks {stats['fallbacks']}")
    for problem in result["problems"].values():
        print(f"  {problem}")
    if against := result.get("against_torch_compile"):
        print(
            f"coexec against {against['best']}: {against['median']:.3f}x [{against['low']:.3f}, {against['high']:.3f}]"
        )


if __name__ == "__main__":
    main()
