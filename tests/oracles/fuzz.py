"""Runs random step programs eagerly and co-executed, and prints where they differ, shrunk.

    python -m tests.oracles.fuzz --programs 20000 --seed 1 --workers 2
    python -m tests.oracles.fuzz --show 4711              # the text of one program

Interrupted, it goes on where it was: finished programs are kept in `--state` (out/fuzz.jsonl by default), which is
started anew when the generator of programs has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.oracles.processes import ROOT, run_child
from tests.oracles.programs import source_of
from tests.oracles.scan import table
from tests.oracles.verdict import FAILURES, Verdict
from tests.oracles.writer import render

CHUNK = 100  # programs per process
STRIDE = 10_000_000  # seeds between two values of --seed


class State:
    """What is known of each program, on disk; several threads add to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: dict[int, Verdict] = {}
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        if lines[:1] == [generator_hash()]:
            for line in lines[1:]:
                self._remember(Verdict(**json.loads(line)))
        else:
            path.write_text(generator_hash() + "\n")

    def add(self, verdict: Verdict) -> None:
        """Keeps a verdict, and says at once what is wrong."""
        with self._lock, self.path.open("a") as file:
            self._remember(verdict)
            file.write(json.dumps(verdict.as_dict()) + "\n")
        if verdict.kind in FAILURES:
            print(f"{verdict.kind}: program {verdict.sample}: {verdict.detail}\n", flush=True)

    def _remember(self, verdict: Verdict) -> None:
        self.verdicts[int(verdict.sample)] = verdict


def generator_hash() -> str:
    """Names the generator: another one writes other programs from the same seeds."""
    parts = [(ROOT / "tests" / "oracles" / f"{name}.py").read_bytes() for name in ("phrases", "writer", "programs")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def fuzz(seeds: range, state: State, workers: int, iterations: int, minutes: float) -> list[Verdict]:
    """Judges the programs of `seeds` that `state` does not know; starts no new process after `minutes`."""
    deadline_s = time.monotonic() + minutes * 60
    missing = [seed for seed in seeds if seed not in state.verdicts]
    chunks = [missing[k : k + CHUNK] for k in range(0, len(missing), CHUNK)]

    def work(chunk: list[int]) -> None:
        if time.monotonic() < deadline_s:
            _run_chunk(chunk, state, iterations)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, chunks))
    return [state.verdicts[seed] for seed in seeds if seed in state.verdicts]


def _run_chunk(seeds: list[int], state: State, iterations: int) -> None:
    """In a process of its own, and in a new one after each crash."""
    first, last = seeds[0], seeds[-1] + 1
    while first < last:
        died_at = run_child(
            "tests.oracles.fuzz_child",
            ["--first", str(first), "--last", str(last), "--iterations", str(iterations)],
            state.add,
        )
        first = int(died_at) + 1 if died_at else last


def main() -> int:
    """The command; returns 1 if a program differs, crashes or hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other programs")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=20, help="calls of each program")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after about so long; run again to go on")
    parser.add_argument("--state", type=Path, default=ROOT / "out" / "fuzz.jsonl")
    parser.add_argument("--show", type=int, default=None, help="print program number SHOW and stop")
    given = parser.parse_args()
    if given.show is not None:
        print(render(source_of(given.show)))
        return 0
    first = given.seed * STRIDE
    seeds = range(first, first + given.programs)
    verdicts = fuzz(seeds, State(given.state), given.workers, given.iterations, given.minutes)
    print(table(verdicts, f"{len(verdicts)} of {given.programs} random programs"))
    return int(bool({verdict.kind for verdict in verdicts} & set(FAILURES)) or not verdicts)


if __name__ == "__main__":
    sys.exit(main())
