"""What co-execution costs Python: microseconds per op, against eager's own dispatch.

    python -m benchmarks.bench_overhead --json out/bench/overhead.json

The step is a chain of tiny adds with autograd, called 25 frames deep, so that a program location is as long as in a
real model; the kernels are so small that nearly all of the time is dispatch. Reported per op:

    eager              y.add(w), w requiring grad
    PythonRunner       the same op, matched in the co-execution phase (StepStats.python_exec_s: stalls excluded)
    tracing, recorded  the same op recorded while the iteration runs; what is learned from it comes after the iteration
    tracing, new       the same op recorded and merged into a TraceGraph that does not know it
    tracing, covered   the same op recorded and merged into a TraceGraph that does

and, per step, what entering and leaving costs: a step of one op against the plain function.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe_machine, write_result
from coexec.intercept.native import native_if_ready, new_step

OPS = 1000
DEPTH = 25
ROUNDS = 40
NATIVE_TIMEOUT_S = 600.0


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny ops use one; idle workers of a pool would only disturb the other thread
    result = {"machine": describe_machine(), "ops": OPS, "depth": DEPTH, **measure(options.rounds)}
    print_result(result)
    write_result(options.json, result)


def measure(rounds: int) -> dict[str, Any]:
    """Returns all figures; microseconds."""
    import coexec

    chain, single = make_chain(OPS), make_chain(1)
    compiled, compiled_single = (coexec.compile(function, backend="replay") for function in (chain, single))
    wait_for_native(compiled)
    reach_co_execution(compiled)
    reach_co_execution(compiled_single)
    return {
        **per_op(chain, compiled, rounds),
        **recording(chain, rounds),
        **tracing(chain, compiled, max(5, rounds // 4)),
        **per_step(single, compiled_single, rounds),
    }


def make_chain(ops: int) -> Callable[[], None]:
    """Returns a function that runs `ops` adds DEPTH frames below itself."""
    start, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def run() -> None:
        y: Tensor = start
        for _ in range(ops):
            y = y.add(weight)

    def descend(depth: int) -> None:
        if depth == 0:
            run()
        else:
            descend(depth - 1)

    return lambda: descend(DEPTH)


def wait_for_native(step: Any) -> None:
    """Runs the step until the native core is there.

    Raises:
        SystemExit: it is not to be had.
    """
    deadline_s = time.monotonic() + NATIVE_TIMEOUT_S
    step()
    while step.stats().phase == "building" and time.monotonic() < deadline_s:
        time.sleep(0.5)
        step()
    if step.stats().phase in ("building", "eager"):
        raise SystemExit(f"coexec cannot run here: {step.explain()}")


def reach_co_execution(step: Any) -> None:
    """Runs the step until it is in the co-execution phase.

    Raises:
        SystemExit: it does not get there within 50 iterations.
    """
    for _ in range(50):
        step()
        if step.stats().phase == "co-execution":
            return
    raise SystemExit(f"the chain did not reach co-execution: {step.explain()}")


def per_op(chain: Callable[[], None], step: Any, rounds: int) -> dict[str, Any]:
    """Returns microseconds per op of eager, of the PythonRunner and of whole co-executed calls, taken by turns."""
    eager_us, python_us, wall_us, ratios = [], [], [], []
    for _ in range(rounds):
        chain()
        eager_us.append(timed_s(chain) / OPS * 1e6)
        step()
        before = step.stats()
        wall_us.append(timed_s(step) / OPS * 1e6)
        after = step.stats()
        python_us.append((after.python_exec_s - before.python_exec_s) / OPS * 1e6)
        ratios.append(python_us[-1] / eager_us[-1])
    return {
        "eager_us_per_op": median(eager_us),
        "python_runner_us_per_op": median(python_us),
        "co_executed_call_us_per_op": median(wall_us),
        "python_runner_ratio": median(ratios),
    }


def tracing(chain: Callable[[], None], step: Any, rounds: int) -> dict[str, Any]:
    """Returns microseconds per op of traced iterations: the first after `reset()`, and those that bring nothing new.

    Merging into the TraceGraph is part of both, planning of the first. Each ratio is to an eager call just before.
    """
    figures: dict[str, list[float]] = {
        "new_us_per_op": [],
        "new_ratio": [],
        "covered_us_per_op": [],
        "covered_ratio": [],
    }
    for _ in range(rounds):
        eager_s = min(timed_s(chain) for _ in range(3))
        step.reset()
        for kind, duration_s in zip(("new", "covered"), traced_calls_s(step), strict=False):
            figures[f"{kind}_us_per_op"].append(duration_s / OPS * 1e6)
            figures[f"{kind}_ratio"].append(duration_s / eager_s)
    return {f"tracing_{name}": median(values) for name, values in figures.items() if values}


def recording(chain: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Returns microseconds per op while an iteration is recorded, without what happens between iterations."""
    module = native_if_ready()
    assert module is not None, "the caller waits for the native core first"
    native = new_step(module)

    def traced() -> None:
        native.begin_trace((), 0, False)
        chain()
        native.finish()

    durations = [(timed_s(chain), timed_s(traced)) for _ in range(rounds)]
    return {
        "tracing_recorded_us_per_op": median(traced_s for _, traced_s in durations) / OPS * 1e6,
        "tracing_recorded_ratio": median(traced_s / eager_s for eager_s, traced_s in durations),
    }


def traced_calls_s(step: Any) -> list[float]:
    """Returns the durations of the calls that ran in the tracing phase, from a reset step's first call on."""
    durations = []
    for _ in range(10):
        before = step.stats().traced
        duration_s = timed_s(step)
        if step.stats().traced == before:
            break
        durations.append(duration_s)
    return durations


def per_step(single: Callable[[], None], step: Any, rounds: int) -> dict[str, Any]:
    """Returns microseconds of a call whose step is one op, and what of it is entering and leaving co-execution."""
    eager_us, step_us = [], []
    for _ in range(rounds):
        eager_us.append(timed_s(lambda: repeat(single, 50)) / 50 * 1e6)
        step_us.append(timed_s(lambda: repeat(step, 50)) / 50 * 1e6)
    eager, co_executed = median(eager_us), median(step_us)
    return {"eager_call_us": eager, "co_executed_call_us": co_executed, "step_start_us": co_executed - eager}


def repeat(function: Callable[[], Any], times: int) -> None:
    """Calls `function` `times` times."""
    for _ in range(times):
        function()


def timed_s(function: Callable[[], Any]) -> float:
    """Returns how long one call takes, in seconds."""
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def print_result(result: dict[str, Any]) -> None:
    """Prints the figures."""
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:<30}{value:10.3f}")


if __name__ == "__main__":
    main()
