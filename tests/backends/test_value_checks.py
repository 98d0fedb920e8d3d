"""Ops whose kernels check values that no decomposition looks at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coexec.backends.fed import NotLowerableError, takes_integers
from coexec.backends.inductor import compile_segment
from coexec.backends.lower import lower
from coexec.backends.value_checks import op_not_to_be_undone
from tests.backends.recording import record

P, TARGET, MASK = torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0.0, 1.0, 1.0]), torch.tensor([True, False, True])


def test_a_check_is_one_more_result() -> None:
    recording = record(lambda recorder: [F.binary_cross_entropy(P, TARGET), P.masked_scatter(MASK, TARGET)])
    graph = lower(recording.spec, {})
    results = graph(*recording.fresh_inputs())
    assert len(results) == len(recording.outputs) + 2
    assert [r.item() for r in results[-2:]] == [1, 1]


def test_what_writes_in_place_is_not_compiled_with_a_check(tmp_path: Path) -> None:
    spec = record(lambda recorder: [P.masked_scatter(MASK, TARGET)]).spec
    with pytest.raises(NotLowerableError, match="aten::masked_scatter cannot be compiled: its kernel may raise"):
        compile_segment(replace(spec, mode="commit"), tmp_path)
    assert op_not_to_be_undone(record(lambda recorder: [F.binary_cross_entropy(P, TARGET)]).spec) is None


@pytest.mark.parametrize(("op", "argument"), [("aten::view", 1), ("aten::flip", 1), ("aten::slice.Tensor", 2)])
def test_sizes_are_integers_whether_they_may_be_symbols_or_not(op: str, argument: int) -> None:
    assert takes_integers(op, argument)
