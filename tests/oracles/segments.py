"""Checks the segments of random programs: each one lowered, run, and compared with the ops as they were recorded.

    python -m tests.oracles.segments --programs 300 --seed 1              # lowered graphs, run by Python: fast
    python -m tests.oracles.segments --programs 20 --compile              # Inductor's artifacts

The programs are fuzz.py's. They run with a compile worker that keeps what it is given (specs and live inputs, in
`--folder`) and compiles nothing; another process, in which steps are not intercepted, judges what was kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.oracles.fuzz import STRIDE
from tests.oracles.processes import ROOT, run_child
from tests.oracles.verdict import FAILURES, Verdict

CHUNK = 50  # programs per process


def collect(seeds: range, folder: Path, iterations: int) -> list[Verdict]:
    """Keeps the segments of the programs of `seeds`; a program that crashes is a verdict."""
    verdicts: list[Verdict] = []
    first = seeds.start
    while first < seeds.stop:
        last = min(first + CHUNK, seeds.stop)
        options = ["--first", str(first), "--last", str(last), "--iterations", str(iterations)]
        died_at = run_child("tests.oracles.segments_child", ["collect", str(folder), *options], verdicts.append)
        first = int(died_at) + 1 if died_at else last
    return verdicts


def judge(folder: Path, compiled: bool) -> list[Verdict]:
    """Judges what is in `folder`, in a new process after each segment that ends one."""
    verdicts: list[Verdict] = []
    after = ""
    while True:
        options = ["--after", after, *(["--compile"] if compiled else [])]
        after = run_child("tests.oracles.segments_child", ["judge", str(folder), *options], verdicts.append)
        if not after:
            return verdicts


def main() -> int:
    """The command; returns 1 if a segment differs or ends its process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other programs")
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--compile", action="store_true", help="judge Inductor's artifacts: seconds per segment")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "segments", help="where segments are kept")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    first = given.seed * STRIDE
    verdicts = collect(range(first, first + given.programs), given.folder, given.iterations)
    verdicts = [verdict for verdict in verdicts if verdict.kind in FAILURES] + judge(given.folder, given.compile)
    for verdict in verdicts:
        if verdict.kind in FAILURES:
            print(f"{verdict.kind}: {verdict.sample}: {verdict.detail}\n", flush=True)
    for (kind, reason), count in Counter((v.kind, v.detail if v.kind == "refused" else "") for v in verdicts).items():
        print(f"{count:6d} {kind} {reason[:160]}")
    return int(any(verdict.kind in FAILURES for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
