"""Random programs against eager: bit for bit, with the graph right behind Python, far behind it, and only on demand."""

from __future__ import annotations

import pytest

from tests.coexec.fuzz import program
from tests.coexec.harness import difference, exact, run

PROGRAMS = 40
ITERATIONS = 20


@pytest.mark.parametrize("mode", ["coexec", "lazy"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_programs_do_what_eager_does(mode: str) -> None:
    co_executed = 0
    for seed in range(PROGRAMS):
        source, make = program(seed if mode == "coexec" else seed + PROGRAMS)
        eager = run(make, ITERATIONS, None, seed)
        got = run(make, ITERATIONS, lambda step: exact(step, mode=mode), seed)
        for i, (a, b) in enumerate(zip(eager.records, got.records, strict=True)):
            assert a == b, f"program {seed}, call {i}: {difference(a, b)}\n{source}\n{got.explanation}"
        assert eager.late == got.late, f"program {seed}, read late: {difference(eager.late, got.late)}\n{source}"
        assert got.stats is not None
        co_executed += got.stats.co_executed
    assert co_executed > PROGRAMS * ITERATIONS // 2  # they were really co-executed, not only traced
