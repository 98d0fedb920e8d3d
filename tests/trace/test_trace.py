"""The checker and the printer of one trace."""

from __future__ import annotations

import dataclasses

import pytest

from coexec.errors import InternalError
from coexec.records import EXTERNAL, OpKind, OpRecord, ValueRef
from coexec.trace.check import check_trace, find_problems
from coexec.trace.render import render_trace
from tests.graph.programs import cut_short, op, trace

GOOD = trace(op(10, -1), op(20, 0), op(30, 1, 0))


@pytest.mark.parametrize(
    ("index", "change", "complaint"),
    [
        (1, {"inputs": (ValueRef(1, 0),)}, "does not exist there"),
        (1, {"inputs": (ValueRef(0, 1),)}, "does not exist there"),
        (1, {"inputs": (ValueRef(EXTERNAL, 9),)}, "does not exist there"),
        (1, {"inputs": (ValueRef(-2, 0),)}, "does not exist there"),
        (2, {"writes": (2,)}, "writes inputs (2,), but has 2"),
        (2, {"writes": (0, 0)}, "writes inputs (0, 0)"),
        (2, {"writes": (0,), "kind": OpKind.VIEW}, "is a VIEW and writes inputs (0,)"),
        (2, {"aliases": (0, 1)}, "has 2 aliases for 1 outputs"),
        (2, {"aliases": (2,)}, "aliases inputs (2,)"),
        (2, {"uid": 10}, "has the uid 0xa of op 0"),
        (2, {"node": 4}, "is matched with node 4 after an unmatched op"),
    ],
)
def test_a_broken_trace_is_reported(index: int, change: dict[str, object], complaint: str) -> None:
    check_trace(GOOD)
    ops: list[OpRecord] = list(GOOD.ops)
    ops[index] = dataclasses.replace(ops[index], **change)
    problems = list(find_problems(dataclasses.replace(GOOD, ops=tuple(ops))))
    assert any(complaint in problem for problem in problems), problems
    with pytest.raises(InternalError, match="Malformed trace"):
        check_trace(dataclasses.replace(GOOD, ops=tuple(ops)))


def test_a_trace_prints_one_op_per_line() -> None:
    ops = (
        dataclasses.replace(op(10, -1, static="mean"), n_outputs=2),
        dataclasses.replace(op(20, -1, 0), writes=(0,), aliases=(0,), random=True, node=7),
        dataclasses.replace(op(30, 1, kind=OpKind.FETCH), inputs=(ValueRef(0, 1),), n_outputs=0, static=()),
    )
    assert render_trace(cut_short(trace(*ops), 3), lambda location: f"step.py:{location}").splitlines() == [
        "trace of 3 ops, 3 externals, cut short",
        "  %0.0, %0.1 = test::op10(ext0, 1)  static=('mean',)  # step.py:10",
        "  %1 = test::op20(ext0!, %0, 1)  static=('',)  aliases=(0,)  random  node=7  # step.py:20",
        "  test::op30(%0.1, 1)  fetch  # step.py:30",
    ]
