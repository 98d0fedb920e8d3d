"""Is the warm-up free? Twenty-step windows of the first steps with coexec, against eager; native build included.

    python -m benchmarks.bench_warmup --programs gpt digits --json out/bench/warmup.json

The coexec process starts with an empty cache, so that its native core and its segments are compiled while it trains.
Eager runs alone before and after it; its own windows show how much this machine wobbles.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import describe_machine, write_result
from examples.demo.child import Child
from examples.demo.variants import COEXEC, EAGER

WINDOW_STEPS = 20
EAGER_WINDOWS = 5
SETTLED_WINDOWS = 5  # how long coexec goes on after its last compilation
LIMIT = 1.5


def main() -> None:
    """Runs the benchmark; the exit status says whether every window kept the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=["gpt", "digits"])
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest warm-up per program")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "limit": LIMIT, "programs": {}}
    for program in options.programs:
        result["programs"][program] = measure(program, options.limit_s)
        print_program(program, result["programs"][program])
    write_result(options.json, result)
    if any(entry["worst_window"] > LIMIT for entry in result["programs"].values()):
        raise SystemExit(f"a window of the warm-up was slower than {LIMIT} times eager")


def measure(program: str, limit_s: float) -> dict[str, Any]:
    """Returns eager's and coexec's windows of one program."""
    before = eager_windows_s(program)
    with tempfile.TemporaryDirectory() as empty:
        windows = coexec_windows(program, limit_s, Path(empty))
    after = eager_windows_s(program)
    eager_s = median([*before, *after])
    for window in windows:
        window["ratio"] = window["seconds"] / eager_s
    return {
        "eager_window_s": eager_s,
        "eager_worst_window": max([*before, *after]) / eager_s,
        "worst_window": max(window["ratio"] for window in windows),
        "last_window": windows[-1]["ratio"],
        "windows": windows,
    }


def eager_windows_s(program: str) -> list[float]:
    """Returns the seconds of eager's windows, the first of which is not counted."""
    with Child(program, EAGER) as child:
        windows = [sum(child.ask("steps", steps=WINDOW_STEPS)["times_s"]) for _ in range(EAGER_WINDOWS + 1)]
    return windows[1:]


def coexec_windows(program: str, limit_s: float, cache: Path) -> list[dict[str, Any]]:
    """Returns coexec's windows from its first step until it has settled: nothing changed for SETTLED_WINDOWS."""
    windows: list[dict[str, Any]] = []
    with Child(program, COEXEC, environment={"COEXEC_CACHE_DIR": os.fspath(cache)}) as child:
        started_s = time.monotonic()
        while time.monotonic() - started_s < limit_s and not settled(windows):
            answer = child.ask("steps", steps=WINDOW_STEPS)
            stats = child.ask("stats")["stats"]
            windows.append(
                {
                    "at_s": time.monotonic() - started_s,
                    "seconds": sum(answer["times_s"]),
                    "slowest_step_s": max(answer["times_s"]),
                    "phase": answer["phase"],
                    "segments": stats["segments"],
                    "fallbacks": sum(stats["fallbacks"].values()),
                }
            )
    return windows


def settled(windows: list[dict[str, Any]]) -> bool:
    """Whether compiled segments run, and nothing has changed for a while."""
    recent = [(window["phase"], window["segments"], window["fallbacks"]) for window in windows[-SETTLED_WINDOWS:]]
    return len(recent) == SETTLED_WINDOWS and "inductor" in recent[-1][1] and all(it == recent[0] for it in recent)


def print_program(program: str, result: dict[str, Any]) -> None:
    """Prints one line per window."""
    print(f"{program}: eager window {result['eager_window_s']:.2f} s, its worst {result['eager_worst_window']:.2f}x")
    for window in result["windows"]:
        bar = "#" * round(window["ratio"] * 20)
        print(f"  {window['at_s']:6.1f} s  {window['ratio']:5.2f}x {bar:<32} {window['phase']} {window['segments']}")
    print(f"  worst window {result['worst_window']:.2f}x (limit {LIMIT}x), last {result['last_window']:.2f}x")


if __name__ == "__main__":
    main()
