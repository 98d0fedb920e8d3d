"""The oracle itself: it must notice a wrong value, stride, exception or random stream, a crash and a hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.coexec.harness import Program
from tests.oracles import verdict as oracle
from tests.oracles.processes import run_child
from tests.oracles.scan import share, table
from tests.oracles.verdict import CRASH, HANG, RAISES, SAME, UNDEFINED, UNSETTLED, WAITS, WRONG, Verdict, judge


def program(body: Callable[[torch.Tensor], Any]) -> Callable[[], Program]:
    return lambda: Program(body, lambda i: (torch.full((3, 2), 0.5 + i),))


def kind(body: Callable[[torch.Tensor], Any], mode: str = "coexec") -> str:
    return judge("sample", program(body), mode).kind


@pytest.mark.parametrize("mode", ["coexec", "lazy"])
def test_a_step_without_reads_is_the_same(mode: str) -> None:
    assert kind(lambda x: x * 2 + 1, mode) == SAME


def test_a_read_inside_the_step_is_a_wait() -> None:
    verdict = judge("sample", program(lambda x: (x @ x.t()).sum().item()), "coexec")
    assert (verdict.kind, verdict.detail) == (WAITS, "fetch")


def test_an_error_in_every_call_is_compared() -> None:
    verdict = judge("sample", program(lambda x: (x * 2) @ x), "coexec")
    assert (verdict.kind, verdict.detail) == (RAISES, "RuntimeError")


def test_a_step_that_never_repeats_is_unsettled() -> None:
    made: list[Any] = []

    def body(x: torch.Tensor) -> Any:
        made.append(None)
        for _ in range(len(made)):
            x = x * 2
        return x

    def make() -> Program:
        made.clear()
        return Program(body, lambda i: (torch.ones(2),))

    assert judge("sample", make, "coexec").kind == UNSETTLED


def test_uninitialized_memory_is_compared_but_for_its_contents() -> None:
    seen: list[float] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(0.0)
        return x * 0 + len(seen)  # differs from run to run, as `empty` does

    assert kind(body) == UNDEFINED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out + 1e-7,
        lambda out: out.double(),
        lambda out: out.t().contiguous().t(),
        lambda out: out.requires_grad_(),
        lambda out: (torch.rand(1), out)[1],
        lambda out: 1 / 0,
    ],
    ids=["value", "dtype", "strides", "requires_grad", "random stream", "exception"],
)
def test_every_difference_is_wrong(spoil: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = oracle.exact

    def wrap(step: Any, **options: Any) -> Any:
        compiled = exact(step, **options)

        def spoiled(*args: Any) -> Any:
            return spoil(compiled(*args))

        spoiled.stats, spoiled.explain = compiled.stats, compiled.explain  # type: ignore[attr-defined]
        return spoiled

    monkeypatch.setattr(oracle, "exact", wrap)
    assert kind(lambda x: x * 2) == WRONG


@pytest.mark.parametrize(("how", "expected"), [("crash", CRASH), ("hang", HANG)])
def test_a_dying_process_is_a_verdict(how: str, expected: str) -> None:
    verdicts: list[Verdict] = []
    assert run_child("tests.oracles.dying_child", [how], verdicts.append) == "second one"
    assert [(v.sample, v.kind) for v in verdicts] == [("first", SAME), ("second one", expected)]


def test_a_process_that_fails_between_samples_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="failed with 3"):
        run_child("tests.oracles.dying_child", ["between"], lambda verdict: None)


def test_the_table_counts_and_shares() -> None:
    kinds = [SAME] * 9 + [WAITS] + [RAISES, UNDEFINED]
    assert share(Counter(kinds)) == 0.9
    text = table([Verdict(str(k), kind) for k, kind in enumerate(kinds)], "ops")
    assert "ops: 12 samples" in text
    assert "90.0%" in text
    assert "waited for" not in table([Verdict("0", SAME)], "ops")


def test_the_table_says_what_was_waited_for_once_per_sample() -> None:
    verdicts = [
        Verdict("0", WAITS, "fetch"),
        Verdict("1", WAITS, "fetch, sync aten::nonzero, sync aten::item"),
        Verdict("2", UNSETTLED, "barrier"),
    ]
    assert "waited for: fetch 2, sync 1\n" in table(verdicts, "ops")
