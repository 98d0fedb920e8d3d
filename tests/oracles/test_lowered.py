"""Lowered graphs against the ops as recorded: of the operator database, and of random programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles import lowered, ops, segments
from tests.oracles.verdict import FAILURES, SAME

NAMES = ["nn.functional.batch_norm", "nn.functional.layer_norm", "index_put", "pow", "nn.functional.conv2d", "std_mean"]


@pytest.mark.filterwarnings("ignore")
def test_operators_are_lowered_to_what_they_do() -> None:
    verdicts = lowered.scan(NAMES, first=2)
    assert [v for v in verdicts if v.kind in FAILURES] == []
    assert {v.sample.split(" ")[0] for v in verdicts if v.kind == SAME} == set(NAMES)


def test_segments_of_random_programs_are_lowered_to_what_they_do(tmp_path: Path) -> None:
    crashed = [v for v in segments.collect(range(12), tmp_path, iterations=20) if v.kind in FAILURES]
    verdicts = segments.judge(tmp_path, compiled=False)
    assert crashed + [v for v in verdicts if v.kind in FAILURES] == []
    assert sum(v.kind == SAME for v in verdicts) >= 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_operators_are_lowered_to_what_they_do() -> None:
    verdicts = lowered.scan(ops.names(), first=1)
    assert [v for v in verdicts if v.kind in FAILURES] == []
    assert sum(v.kind == SAME for v in verdicts) > 1000
