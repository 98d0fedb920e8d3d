"""The process that judges samples: it may crash or hang, and its parent knows at which sample. See scan.py.

Prints one line before each sample and one after it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import warnings
from collections.abc import Callable, Iterator

import torch

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready
from tests.coexec.harness import Program
from tests.oracles.processes import begin, end
from tests.oracles.verdict import ITERATIONS, Verdict, judge

HANG_S = 60.0  # a sample takes milliseconds
MODES = ("coexec", "lazy")
BITS_VARY = ("linalg.lstsq",)
"""Eager's own results differ in the last bits in one of a hundred calls (LAPACK, by where the memory lies)."""

CALLS = {"ops": ITERATIONS, "modules": ITERATIONS, "optimizers": 14}
"""Per sample. Some optimizers take other branches in their first calls."""


def main() -> None:
    """Judges the samples of the entries given, after `--after` if that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=("ops", "modules", "optimizers"))
    parser.add_argument("--names", nargs="*", default=None)
    parser.add_argument("--first", type=int, default=None)
    parser.add_argument("--after", default="")
    parser.add_argument("--only", default="", help="judge the samples whose name contains this")
    given = parser.parse_args()
    _quiet()
    build(verbose=False)
    assert native_if_ready() is not None
    found = _samples(given.suite, given.names, given.first)
    if given.after:
        found = _after(found, given.after)
    for k, (sample, make) in enumerate(found):
        if given.only in sample:
            begin(sample)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            verdict = judge(sample, make, MODES[k % 2], CALLS[given.suite], bits_vary=sample.startswith(BITS_VARY))
            faulthandler.cancel_dump_traceback_later()
            end(verdict)
            coexec.reset()


def _quiet() -> None:
    """Small tensors on one thread; the samples of the databases warn a lot."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _samples(suite: str, names: list[str] | None, first: int | None) -> Iterator[tuple[str, Callable[[], Program]]]:
    module = importlib.import_module(f"tests.oracles.{suite}")
    for name in names or module.names():
        try:
            yield from module.samples(name, first)
        except Exception as error:  # the database itself cannot make a sample here (a library is missing ...)
            end(Verdict(name, "no sample", f"{type(error).__name__}: {error}"))


def _after(
    found: Iterator[tuple[str, Callable[[], Program]]], last: str
) -> Iterator[tuple[str, Callable[[], Program]]]:
    for sample, _ in found:
        if sample == last:
            break
    yield from found


if __name__ == "__main__":
    main()
