"""What became of one sample: it runs eagerly and co-executed, and everything a user can see is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coexec.records import OpKind
from tests.coexec.harness import Outcome, Program, difference, exact, run

ITERATIONS = 6
"""Two calls are traced, four co-executed; the results of calls 2 and 5 are read only at the end."""

SAME = "same"  # equal, co-executed, and Python waited for nothing but the step's end
WAITS = "waits"  # equal and co-executed, but Python waited for a value or an op inside the step
UNSETTLED = "unsettled"  # equal, but the step did not get into co-execution
RAISES = "raises"  # eager raises in every call, and so did the step, with the same type and text
UNDEFINED = "undefined"  # eager disagrees with itself (`empty`): all but the bits was compared
WRONG = "wrong"
CRASH = "crash"
HANG = "hang"

FAILURES = (WRONG, CRASH, HANG)
CO_EXECUTED = (SAME, WAITS, UNSETTLED)  # what the share of samples without waiting is a share of


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sample's outcome; it travels between processes as JSON."""

    sample: str  # "<entry> <dtype> <variant> #<number>"
    kind: str  # one of the words above
    detail: str = ""  # what differs, or why Python waited

    def as_dict(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def judge(
    sample: str, make: Callable[[], Program], mode: str, n: int = ITERATIONS, *, bits_vary: bool = False
) -> Verdict:
    """Compares `n` co-executed calls of the step that `make` builds with eager.

    Args:
        mode: "coexec", or "lazy": the graph starts only when Python needs a value, so it is as far behind as it can be.
        bits_vary: eager's last bits are known to vary now and then, too rarely for a second run to show it.
    """
    eager = run(make, n, None)
    try:
        got = run(make, n, lambda step: exact(step, mode=mode))
    except AssertionError as error:  # a snapshot met something that no step may leave behind
        return Verdict(sample, WRONG, str(error))
    expected, actual = _seen(eager), _seen(got)
    if expected != actual:
        return _judge_difference(
            sample, expected, actual, None if bits_vary else _seen(run(make, n, None)), _last_words(got)
        )
    if len(eager.errors) == n:
        return Verdict(sample, RAISES, type(eager.errors[0]).__name__)
    return Verdict(sample, *_how_it_ran(got, n))


def _judge_difference(sample: str, expected: Any, actual: Any, again: Any, note: str) -> Verdict:
    """Where eager itself differs from run to run, all but the contents counts."""
    defined = expected == again
    if not defined:
        expected, actual = without_bits(expected), without_bits(actual)
    if expected == actual:
        return Verdict(sample, UNDEFINED)
    return Verdict(sample, WRONG, f"{difference(expected, actual)} {note}")


def without_bits(picture: Any) -> Any:
    """A snapshot without the contents of tensors."""
    if isinstance(picture, bytes):
        return len(picture)
    if isinstance(picture, tuple | list):
        return tuple(without_bits(x) for x in picture)
    return picture


def _seen(outcome: Outcome) -> Any:
    return (outcome.records, outcome.late)


def _how_it_ran(got: Outcome, n: int) -> tuple[str, str]:
    assert got.stats is not None
    if got.stats.phase != "co-execution" or got.stats.co_executed < n // 2:
        return UNSETTLED, f"{got.stats.phase}, {got.stats.co_executed} co-executed, {dict(got.stats.fallbacks)}"
    waits = {why: count for why, count in got.compiled._runner.wait_counts().items() if count and why != "step end"}
    return (WAITS, ", ".join(_waiting_ops(got) or waits)) if waits else (SAME, "")


def _waiting_ops(got: Outcome) -> list[str]:
    """What Python waits at, each once: "fetch", "sync <op>", "barrier <function>"."""
    nodes = got.compiled._runner.graph.nodes
    kinds = (OpKind.FETCH, OpKind.SYNC, OpKind.BARRIER)
    return sorted(
        {"fetch" if n.kind == OpKind.FETCH else f"{n.kind.name.lower()} {n.op}" for n in nodes if n.kind in kinds}
    )


def _last_words(got: Outcome) -> str:
    """The error that only the co-executed run raised, if there was one."""
    return f"({type(got.errors[-1]).__name__}: {str(got.errors[-1])[:300]})" if got.errors else ""
