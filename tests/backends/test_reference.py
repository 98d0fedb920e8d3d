"""The reference interpreter is bit-equal to the recorded eager run, and its float64 run follows the same path."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coexec.backends.reference import NoWideRunError, run_reference, run_reference_pair
from coexec.backends.spec import SpecError
from tests.backends.programs import PROGRAMS
from tests.backends.recording import record


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", ["commit", "functional"])
def test_reference_is_bit_equal_to_eager(name: str, mode: str) -> None:
    recording = PROGRAMS[name](mode=mode)
    inputs = recording.fresh_inputs()
    torch.set_rng_state(recording.rng_before)
    results = run_reference(recording.spec, inputs)
    assert torch.equal(torch.get_rng_state(), recording.rng_after)
    for got, expected in (
        (results.outputs, recording.outputs),
        (results.mutated, recording.mutated),
        (results.published, recording.published),
    ):
        assert len(got) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(results.published) == len(recording.spec.publishes) > 0
    touched = [not torch.equal(a, b) for a, b in zip(inputs, recording.inputs, strict=True)]
    assert any(touched) == (mode == "commit")


@pytest.mark.parametrize("name", PROGRAMS)
def test_float64_run_is_near_and_takes_draws_and_integers_over(name: str) -> None:
    recording = PROGRAMS[name]()
    torch.set_rng_state(recording.rng_before)
    narrow, wide = run_reference_pair(recording.spec, recording.fresh_inputs())
    assert torch.equal(torch.get_rng_state(), recording.rng_after)
    pairs = [
        *zip(narrow.outputs, wide.outputs, strict=True),
        *zip(narrow.mutated, wide.mutated, strict=True),
        *zip(narrow.published, wide.published, strict=True),
    ]
    for a, b in pairs:
        assert b.dtype == (torch.float64 if a.is_floating_point() else a.dtype)
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-3)
    assert any(a.is_floating_point() and not torch.equal(a.double(), b) for a, b in pairs)


def test_native_dropout_in_float64_uses_the_drawn_mask() -> None:
    x = torch.randn(64) / 3
    recording = record(lambda _: torch.native_dropout(x, 0.3, True))
    narrow, wide = run_reference_pair(recording.spec, recording.fresh_inputs())
    assert torch.equal(narrow.outputs[1], wide.outputs[1])
    torch.testing.assert_close(wide.outputs[0], x.double() * narrow.outputs[1] / 0.7, rtol=1e-14, atol=0)


def test_reinterpreted_memory_has_no_float64_run() -> None:
    x = torch.randn(4)
    recording = record(lambda _: [x.view(torch.int32) + 1])
    with pytest.raises(NoWideRunError):
        run_reference_pair(recording.spec, recording.fresh_inputs())


def test_a_result_that_looks_different_is_named() -> None:
    x = torch.randn(4)
    recording = record(lambda _: [x + 1])
    bad = replace(recording.spec.ops[0].outs[0], dtype="int32")
    spec = replace(recording.spec, ops=(replace(recording.spec.ops[0], outs=(bad,)),))
    with pytest.raises(SpecError, match=r"value 1 is recorded as int32\[4\], the run gave float32\[4\]"):
        run_reference(spec, recording.fresh_inputs())
