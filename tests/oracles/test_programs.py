"""Random programs against eager: bit for bit, with the graph right behind Python, far behind it, and on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.fuzz import State, fuzz
from tests.oracles.fuzz_child import run_program
from tests.oracles.programs import source_of
from tests.oracles.scan import table
from tests.oracles.verdict import CO_EXECUTED, FAILURES, UNSETTLED
from tests.oracles.writer import render

PROGRAMS = 40
CALLS = 20


@pytest.mark.filterwarnings("ignore")
def test_random_programs_do_what_eager_does() -> None:
    kinds = []
    for seed in range(PROGRAMS):
        verdict = run_program(seed, source_of(seed), CALLS)
        assert verdict.kind not in FAILURES, f"{verdict.detail}\n{render(source_of(seed))}"
        kinds.append(verdict.kind)
    settled = [kind for kind in kinds if kind in CO_EXECUTED and kind != UNSETTLED]
    assert len(settled) > PROGRAMS // 2  # they were really co-executed, not only traced


@pytest.mark.slow
def test_many_random_programs_do_what_eager_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = fuzz(range(1000, 2000), State(tmp_path / "fuzz.jsonl"), workers=2, iterations=CALLS, minutes=60)
    with capsys.disabled():
        print(f"\n{table(verdicts, 'random programs')}")
    assert len(verdicts) == 1000
    assert [v.detail for v in verdicts if v.kind in FAILURES] == []
