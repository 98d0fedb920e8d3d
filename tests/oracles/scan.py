"""Runs PyTorch's operator, module and optimizer databases through co-executed steps, in processes of their own.

    python -m tests.oracles.scan ops                     # every sample: an hour of one core
    python -m tests.oracles.scan modules --first 1       # one sample per entry, dtype and variant
    python -m tests.oracles.scan ops --names add "nn.functional.pad.constant"

Prints what is wrong and a table of the counts; `--json` writes every verdict.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.oracles.processes import run_child
from tests.oracles.verdict import CO_EXECUTED, FAILURES, SAME, WAITS, Verdict

SUITES = ("ops", "modules", "optimizers")
KINDS = ("same", "waits", "unsettled", "raises", "undefined", "wrong", "crash", "hang", "no sample")


def scan(suite: str, names: list[str] | None = None, first: int | None = None, workers: int = 2) -> list[Verdict]:
    """Returns a verdict for each sample of the entries `names` (all by default), the `first` of each variant."""
    chosen = names or importlib.import_module(f"tests.oracles.{suite}").names()
    shards = [chosen[k::workers] for k in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda shard: _scan_shard(suite, shard, first), (s for s in shards if s))
        return [verdict for verdicts in found for verdict in verdicts]


def _scan_shard(suite: str, names: list[str], first: int | None) -> list[Verdict]:
    """Starts a new process after each one that dies; what it was doing is the verdict."""
    verdicts: list[Verdict] = []
    options = ["--first", str(first)] if first is not None else []
    after: list[str] = []
    while names:
        running = run_child("tests.oracles.scan_child", [suite, *options, *after, "--names", *names], verdicts.append)
        if not running:
            break
        # Entries before the one that died are done; within it the child goes on after the sample.
        names = names[names.index(running.split(" ")[0]) :]
        after = ["--after", running]
    return verdicts


def table(verdicts: Iterable[Verdict], title: str) -> str:
    """The counts of each kind, what Python waited for, and the share of samples that co-execute without waiting."""
    verdicts = list(verdicts)
    counts = Counter(verdict.kind for verdict in verdicts)
    lines = [f"{title}: {counts.total()} samples"]
    lines += [f"  {kind:10s} {counts[kind]:6d}" for kind in KINDS if counts[kind]]
    if causes := waited_for(verdicts):
        lines.append(f"  waited for: {', '.join(f'{cause} {n}' for cause, n in causes.most_common())}")
    lines.append(f"  co-executed without waiting: {share(counts):.1%}")
    return "\n".join(lines)


def waited_for(verdicts: Iterable[Verdict]) -> Counter[str]:
    """How many samples waited for a value that the program reads (fetch), an op that Python runs (sync) ...

    A sample that waited for several things counts for each.
    """
    details = (verdict.detail.split(", ") for verdict in verdicts if verdict.kind == WAITS)
    return Counter(cause for detail in details for cause in {part.split(" ")[0] for part in detail})


def share(counts: Counter[str]) -> float:
    """Of the samples that compute something, the share that co-executes without Python waiting."""
    return counts[SAME] / max(1, sum(counts[kind] for kind in CO_EXECUTED))


def main() -> int:
    """The command; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--names", nargs="*", default=None, help="entries of the database; all by default")
    parser.add_argument("--shard", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--first", type=int, default=None, help="samples per entry, dtype and variant; all by default")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="where to write the verdicts")
    given = parser.parse_args()
    k, n = map(int, given.shard.split("/"))
    names = given.names or importlib.import_module(f"tests.oracles.{given.suite}").names()[k::n]
    verdicts = scan(given.suite, names, given.first, given.workers)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1))
    for verdict in verdicts:
        if verdict.kind in (*FAILURES, "unsettled", "no sample"):
            print(f"{verdict.kind}: {verdict.sample}: {verdict.detail[:400]}")
    print(table(verdicts, given.suite))
    return int(any(verdict.kind in FAILURES for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
