"""PyTorch's operator, module and optimizer databases: every sample equals eager bit for bit, and co-executes."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.oracles.scan import scan, share, table
from tests.oracles.verdict import FAILURES, UNSETTLED, Verdict

MIN_SHARE = {"ops": 0.9, "modules": 0.9, "optimizers": 0.8}
"""Of the samples, those that must co-execute without Python waiting inside the step. What is left of the optimizers
reads what the step has computed: Adafactor the norm of an update, LBFGS its losses, a plateau schedule the loss; and
SparseAdam coalesces, the size of which depends on data."""

MIN_FIRST_SHARE = {**MIN_SHARE, "optimizers": 0.6}
"""The same of the first samples: every optimizer has one with a plateau schedule, a third of them all."""


def check(verdicts: list[Verdict], suite: str, min_share: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """Shows the table; fails with what is wrong."""
    with capsys.disabled():
        print(f"\n{table(verdicts, suite)}")
    wrong = [f"{v.kind}: {v.sample}: {v.detail[:500]}" for v in verdicts if v.kind in FAILURES]
    assert not wrong, "\n".join(wrong)
    assert share(Counter(v.kind for v in verdicts)) > min_share[suite]


@pytest.mark.parametrize("suite", ["ops", "modules", "optimizers"])
def test_first_sample_of_each_entry_is_as_eager(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(scan(suite, first=1), suite, MIN_FIRST_SHARE, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["ops", "modules", "optimizers"])
def test_every_sample_is_as_eager(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = scan(suite)
    check(verdicts, suite, MIN_SHARE, capsys)
    if suite != "optimizers":  # LBFGS runs its closure as often as the data says
        assert [v for v in verdicts if v.kind == UNSETTLED] == []
