"""Whose fault it is that an attempt ended: the candidate's, or the budget's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from coexec.subgraphs.entries import Outcome
from coexec.tuning.attempt import Attempt, BudgetSpentError, EndedError, Prepared, checked, prepare
from coexec.tuning.child import Child, ChildError
from coexec.tuning.nursery import Nursery
from coexec.tuning.roster import Roster
from coexec.tuning.settings import TuneSettings

SETTINGS = TuneSettings(attempt_s=240.0)


class Slow:
    """A roster and its only child, which answers nothing in the time that it is given."""

    def __init__(self) -> None:
        self.given_s: list[float] = []

    @contextlib.contextmanager
    def child(self, name: str) -> Iterator[Slow]:
        yield self

    def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.given_s.append(timeout_s)
        raise ChildError(Outcome.TIMEOUT, f"{question['do']} took more than {timeout_s:.0f} s")


def check(slow: Slow, left_s: float, tmp_path: Path) -> None:
    built = Prepared("tvm", tmp_path, {}, 1.0, "")
    checked(built, tmp_path / "program", cast(Roster, slow), 1, SETTINGS, lambda: left_s)


def built(slow: Slow, left_s: float, tmp_path: Path) -> Prepared | Attempt:
    roster = cast(Roster, slow)
    return prepare("tvm", tmp_path, tmp_path, roster, 1, SETTINGS, lambda: left_s, lambda stage: None)


@pytest.mark.parametrize("left_s", [0.0, -2.0, float("-inf")])
def test_with_no_time_left_nothing_is_asked(left_s: float, tmp_path: Path) -> None:
    slow = Slow()
    with pytest.raises(BudgetSpentError, match="the budget was spent"):
        check(slow, left_s, tmp_path)
    assert slow.given_s == []


def test_what_had_less_than_an_attempts_time_is_not_blamed(tmp_path: Path) -> None:
    with pytest.raises(BudgetSpentError):
        check(Slow(), 30.0, tmp_path)
    ended = built(Slow(), 30.0, tmp_path)
    assert isinstance(ended, Attempt)
    assert (ended.out_of_time, ended.detail) == (True, "the budget was spent")


def test_what_had_an_attempts_time_is_blamed(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match="load took more than 240 s") as caught:
        check(Slow(), 900.0, tmp_path)
    assert not isinstance(caught.value, BudgetSpentError)
    ended = built(Slow(), 900.0, tmp_path)
    assert isinstance(ended, Attempt)
    assert (ended.outcome, ended.out_of_time) == (Outcome.TIMEOUT, False)


def test_a_child_can_be_ended_as_soon_as_it_is_started() -> None:
    """Before it has done anything: it must lead its process group by then, or it lives on and is waited for."""
    with contextlib.closing(Nursery(1)) as nursery:
        for _ in range(20):
            child = Child(nursery, memory_bytes=1 << 30, name="short-lived")
            ended = threading.Thread(target=child.end, daemon=True)
            ended.start()
            ended.join(20.0)
            assert not ended.is_alive()
