"""Does it stay? Two thousand steps with a branch that flips at random: memory, threads, and who is left afterwards.

    python -m benchmarks.bench_soak --programs gpt digits --json out/bench/soak.json

Memory is read every 100 steps, and its growth is the slope of a line through the second half of the readings (the first
half contains compilation). Eager runs the same steps beside it, since a Python program's memory creeps by itself.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe_machine, write_result
from coexec.intercept.build import build as build_native_core
from examples.demo.child import Child
from examples.demo.variants import COEXEC, EAGER

STEPS = 2000
READ_EVERY = 100
GROWTH_LIMIT_BYTES = 4 * 2**20  # per 1,000 steps, above eager's own: one leaked activation would be twenty times that
LEAVE_TIMEOUT_S = 10.0


def main() -> None:
    """Runs the benchmark; the exit status says whether anything grew or stayed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=["gpt", "digits"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    build_native_core()  # so that all steps are about co-execution; bench_warmup.py is about the time before
    result: dict[str, Any] = {"machine": describe_machine(), "steps": options.steps, "programs": {}}
    problems = []
    for program in options.programs:
        runs = {variant: soak(program, variant, options.steps) for variant in (EAGER, COEXEC)}
        result["programs"][program] = runs
        for variant, run in runs.items():
            print_run(program, variant, run)
        problems += problems_of(program, runs[EAGER], runs[COEXEC])
    write_result(options.json, result)
    if problems:
        raise SystemExit("\n".join(problems))


def soak(program: str, variant: str, steps: int) -> dict[str, Any]:
    """Returns the readings of one run, and the processes of its session that are left after its end."""
    readings = []
    child = Child(program, variant)
    try:
        for _ in range(steps // READ_EVERY):
            answer = child.ask("steps", steps=READ_EVERY)
            readings.append({name: answer[name] for name in ("rss_bytes", "threads", "phase", "loss")})
        stats = child.ask("stats").get("stats", {})
    finally:
        exit_status = child.close()
    return {
        "growth_bytes_per_1000_steps": growth([reading["rss_bytes"] for reading in readings]),
        "threads": [readings[len(readings) // 2]["threads"], readings[-1]["threads"]],
        "exit_status": exit_status,
        "left_behind": left_behind(child.session),
        "stats": stats,
        "readings": readings,
    }


def growth(rss_bytes: list[int]) -> float:
    """Returns the slope through the second half of the readings, in bytes per 1,000 steps."""
    second_half = np.asarray(rss_bytes[len(rss_bytes) // 2 :], dtype=float)
    if len(second_half) < 2:
        return 0.0
    slope = np.polyfit(np.arange(len(second_half)), second_half, 1)[0]
    return float(slope) * 1000 / READ_EVERY


def left_behind(session: int) -> list[str]:
    """Returns the command lines of the processes of `session` that do not end within LEAVE_TIMEOUT_S."""
    deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
    while (names := session_members(session)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return names


def session_members(session: int) -> list[str]:
    """Returns the command lines of the live processes of `session`."""
    names = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] != "Z":
                names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return names


def problems_of(program: str, eager: dict[str, Any], coexec: dict[str, Any]) -> list[str]:
    """Returns what is wrong with coexec's run, if anything."""
    problems = []
    excess = coexec["growth_bytes_per_1000_steps"] - max(0.0, eager["growth_bytes_per_1000_steps"])
    if excess > GROWTH_LIMIT_BYTES:
        problems.append(f"{program}: memory grows by {excess / 2**20:.1f} MiB per 1,000 steps more than eager's")
    if coexec["threads"][1] > coexec["threads"][0]:
        problems.append(f"{program}: threads grew from {coexec['threads'][0]} to {coexec['threads'][1]}")
    if coexec["left_behind"]:
        problems.append(f"{program}: left behind after exit: {coexec['left_behind']}")
    if (phase := coexec["readings"][-1]["phase"]) != "co-execution":
        problems.append(f"{program}: ended in the phase {phase!r}, so this says nothing about co-execution")
    if coexec["exit_status"] != 0:
        problems.append(f"{program}: exit status {coexec['exit_status']}")
    return problems


def print_run(program: str, variant: str, run: dict[str, Any]) -> None:
    """Prints one line per run."""
    last = run["readings"][-1]
    print(
        f"{program:<8}{variant:<8} growth {run['growth_bytes_per_1000_steps'] / 2**20:+6.2f} MiB per 1,000 steps, "
        f"{last['rss_bytes'] / 2**20:.0f} MiB, {last['threads']} threads, phase {last['phase']}, "
        f"left behind {len(run['left_behind'])}"
    )


if __name__ == "__main__":
    main()
