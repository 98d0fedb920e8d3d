"""Whole steps drawn from user reports (the folder that COEXEC_CASES names): bit for bit replayed, close compiled."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.oracles.cases import CaseResult, cases, run_case

WITHOUT_COMPILED_SEGMENTS: dict[str, str] = {
    "19_lora_toggle": "its few ops are not worth a segment",
    "21_inputs_start_to_alias": "it writes to arguments that overlap each other",
}
"""Cases that never run compiled code, and why."""

PERHAPS_COMPILED: dict[str, str] = {
    "15_class_attribute_schedule": "new paths until call 8; its one segment is on a path seldom taken",
    "17_buffer_reassigned": "the row that it writes moves: six places in memory, each with code of its own",
    "29_param_storage_swapped": "its weights are tied in call 10: what was compiled before is discarded",
    "33_python_random_shuffle": "the order of its work is drawn: its loop is folded, and a new path comes in call 14",
    "39_every_batch_another_shape": "21 sets of shapes",
    "45_lbfgs_closure": "thousands of ops on ever new paths",
    "61_packed_lstm": "its loops are folded, which takes 11 traced calls, and new shapes come in call 16",
    "63_adaptive_early_exit": "loops of ever new lengths, folded; a new path in call 14",
    "73_nested_jagged": "17 sets of shapes",
    "91_layout_and_dtype_change": "four layouts and two dtypes: new shapes until call 20",
}
"""Cases whose code may still be compiling when the last call is over, and why so late."""

UNSTABLE_PATHS: dict[str, str] = {}
"""Cases that need not end in co-execution with few fallbacks, and why."""

MAX_FALLBACKS = 8

CASES = cases()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CASES, reason="COEXEC_CASES names no folder of cases"),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)


@functools.cache
def replayed(case: Path, wrapper: str, late: bool) -> CaseResult:
    return run_case(case, wrapper, late)


@every_case
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("wrapper", ["replay", "lazy"])
def test_replay_is_bit_identical(case: Path, wrapper: str, late: bool) -> None:
    result = replayed(case, wrapper, late)
    assert not result.failure, result.failure
    assert result.differences == {}


@every_case
@pytest.mark.compile
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_compiled_is_close_and_was_compiled(case: Path, late: bool) -> None:
    result = run_case(case, "default", late)
    assert not result.failure, result.failure
    assert result.differences == {}
    if case.stem in PERHAPS_COMPILED:
        return
    ran = result.report["compiled_runs_after_wait"] > 0
    assert ran != (case.stem in WITHOUT_COMPILED_SEGMENTS), result.report["explain"]


def test_stable_cases_settle() -> None:
    stable = [case for case in CASES if case.stem not in UNSTABLE_PATHS]
    results = {case.stem: replayed(case, "replay", False) for case in stable}
    settled = [n for n, r in results.items() if r.phase == "co-execution" and r.fallbacks < MAX_FALLBACKS]
    assert len(settled) >= 0.9 * len(stable), sorted(set(results) - set(settled))
