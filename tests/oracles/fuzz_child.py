"""The process that runs random programs; see fuzz.py. It may crash or hang, and its parent knows at which program."""

from __future__ import annotations

import argparse
import faulthandler
import warnings
from dataclasses import replace

import torch

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready
from tests.oracles.processes import begin, end
from tests.oracles.programs import maker, source_of
from tests.oracles.shrink import shrink
from tests.oracles.verdict import WRONG, Verdict, judge
from tests.oracles.writer import Block, render

HANG_S = 120.0  # a program takes a fraction of a second


def main() -> None:
    """Judges the programs of the seeds given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True, help="the seed after the last one")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--shrink", type=int, default=150, help="how many smaller programs are tried")
    given = parser.parse_args()
    prepare()
    for seed in range(given.first, given.last):
        begin(str(seed))
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        verdict = run_program(seed, source_of(seed), given.iterations)
        faulthandler.cancel_dump_traceback_later()
        if verdict.kind == WRONG and given.shrink:
            verdict = shrunk(seed, verdict, given.iterations, given.shrink)
        end(verdict)
        coexec.reset()


def prepare() -> None:
    """Small tensors on one thread; random programs warn a lot."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    build(verbose=False)
    assert native_if_ready() is not None


def run_program(seed: int, program: Block, iterations: int) -> Verdict:
    """Every third program runs with the graph as far behind Python as it can be."""
    return judge(str(seed), maker(program, seed), "lazy" if seed % 3 == 2 else "coexec", iterations)


def shrunk(seed: int, verdict: Verdict, iterations: int, attempts: int) -> Verdict:
    """The verdict with the smallest program found that still differs."""

    def still(program: Block) -> bool:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            return run_program(seed, program, iterations).kind == WRONG
        except SyntaxError:
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()

    small = shrink(source_of(seed), still, attempts)
    detail = run_program(seed, small, iterations).detail or verdict.detail
    return replace(verdict, detail=f"{detail}\n{render(small)}")


if __name__ == "__main__":
    main()
