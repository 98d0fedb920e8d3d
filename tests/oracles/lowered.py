"""Lowers every sample of PyTorch's operator database as a segment and compares the graph with the ops as recorded.

    python -m tests.oracles.lowered                     # the first three samples of each variant
    python -m tests.oracles.lowered --first 1 --names add std_mean

The graph is run by Python: what Inductor makes of it is not judged here. Prints what differs, and why ops are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from coexec.backends.fed import NotLowerableError
from coexec.backends.lower import lower
from coexec.backends.publish import register_publish
from coexec.backends.verify import check
from tests.backends.recording import Recording, record
from tests.coexec.harness import Program
from tests.oracles import ops
from tests.oracles.processes import begin, end, run_child
from tests.oracles.segments_child import REFUSED, graph_of
from tests.oracles.verdict import FAILURES, SAME, WRONG, Verdict

UNRECORDED = "unrecorded"  # eager raises, or a segment cannot hold what it returns


def verdicts_of(name: str, first: int) -> Iterator[Verdict]:
    """Judges the first samples of one entry, by dtype and variant."""
    for sample, make in ops.samples(name, first):
        begin(sample)
        verdict = judge(sample, make)
        end(verdict)
        yield verdict


def judge(sample: str, make: Callable[[], Program]) -> Verdict:
    """One sample: forward and backward are one segment."""
    try:
        recording = _recorded(make())
    except Exception as error:
        return Verdict(sample, UNRECORDED, f"{type(error).__name__}: {error}"[:200])
    try:
        run = graph_of(lower(recording.spec, torch._inductor.decomposition.select_decomp_table()))
    except NotLowerableError as error:
        return Verdict(sample, REFUSED, str(error))
    problems = check(recording.spec, run, recording.fresh_inputs(), recording.rng_before, timed=False).problems
    return Verdict(sample, WRONG if problems else SAME, "; ".join(problems))


def _recorded(program: Program) -> Recording:
    def run(_: Any) -> list[torch.Tensor]:
        found = [t for t in tree_leaves(program.step()) if isinstance(t, torch.Tensor)]
        return [t.clone() for t in found if t.layout == torch.strided and not t.is_nested]

    return record(run)


def scan(names: list[str], first: int) -> list[Verdict]:
    """Judges the entries `names`, each process going on behind the entry that ended the one before it."""
    verdicts: list[Verdict] = []
    while names:
        arguments = ["--child", "--first", str(first), "--names", *names]
        died_in = run_child("tests.oracles.lowered", arguments, verdicts.append)
        if not died_in:
            break
        names = names[names.index(died_in.split(" ")[0]) + 1 :]
    return verdicts


def main() -> int:
    """The command; returns 1 if a graph differs or ends its process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=None, help="entries of the database; all by default")
    parser.add_argument("--first", type=int, default=3, help="samples per entry, dtype and variant")
    parser.add_argument("--shard", default="0/1", help="k/n: every n-th entry from the k-th on")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    k, n = map(int, given.shard.split("/"))
    names = given.names or ops.names()[k::n]
    if given.child:
        register_publish()
        for name in names:
            list(verdicts_of(name, given.first))
        return 0
    verdicts = scan(names, given.first)
    for verdict in verdicts:
        if verdict.kind in FAILURES:
            print(f"{verdict.kind}: {verdict.sample}: {verdict.detail[:600]}\n", flush=True)
    reasons = Counter((v.kind, v.detail if v.kind == REFUSED else "") for v in verdicts)
    for (kind, reason), count in sorted(reasons.items()):
        print(f"{count:6d} {kind} {reason[:200]}")
    return int(any(verdict.kind in FAILURES for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
