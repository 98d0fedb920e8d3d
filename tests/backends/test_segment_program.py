"""A segment for the tuner: what was compiled, and inputs like the live ones, in one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coexec.backends.candidates.program import ProgramError
from coexec.backends.reference import run_reference
from coexec.backends.segment_program import (
    Observation,
    SegmentProgram,
    is_segment_program,
    observe,
    read_program,
    write_program,
)
from coexec.backends.symbolic import SymbolicSpec
from tests.backends.programs import mlp_adamw
from tests.backends.recording import record


def written(folder: Path, *observed: Observation) -> SegmentProgram:
    path = folder / "program.json"
    write_program(SegmentProgram(observed), path)
    assert is_segment_program(path)
    return read_program(path)


def test_a_training_step_survives_with_inputs_that_it_can_run_on(tmp_path: Path) -> None:
    recording = mlp_adamw()
    program = written(tmp_path, observe(recording.spec, recording.inputs))
    assert program.spec == recording.spec
    (observation,) = program.observed
    for seed in (0, 1):
        inputs = observation.inputs(seed)
        for made, live in zip(inputs, recording.inputs, strict=True):
            assert (made.dtype, made.shape, made.stride()) == (live.dtype, live.shape, live.stride())
            if not live.is_floating_point() or live.dim() == 0:
                assert torch.equal(made, live)  # labels, and numbers that are fed
            else:
                assert live.min() <= made.min() <= made.max() <= live.max()
        assert all(torch.isfinite(t).all() for t in run_reference(recording.spec, inputs).outputs)
    again, other = observation.inputs(0), observation.inputs(1)
    assert all(map(torch.equal, observation.inputs(0), again))
    assert not all(map(torch.equal, again, other))


def test_inputs_that_shared_memory_share_it_again(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    recording = record(lambda _: [base[1:].mul_(2.0).sum() + base.t()[:, 0:1].expand(8, 3).sum()])
    (observation,) = written(tmp_path, observe(recording.spec, recording.inputs)).observed
    made = observation.inputs(0)
    values = list(recording.spec.input_values())
    assert len({value.storage for value in values}) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 1
    for value, tensor in zip(values, made, strict=True):
        assert (tensor.stride(), tuple(tensor.shape)) == (value.strides, value.sizes)
        assert tensor.storage_offset() - made[0].storage_offset() == value.offset - values[0].offset


def test_a_segment_for_many_sizes_is_one_again(tmp_path: Path) -> None:
    observed = []
    for size in (5, 9):
        x = torch.randn(size, 3)
        recording = record(lambda _, x=x: [x.exp().sum(1)])  # type: ignore[misc]
        observed.append(observe(recording.spec, recording.inputs))
    program = written(tmp_path, *observed)
    assert isinstance(program.spec, SymbolicSpec)
    assert [one.inputs(0)[0].shape[0] for one in program.observed] == [5, 9]


@pytest.mark.parametrize(
    "form",
    [{"coexec-segment-program": 2, "observed": [1]}, {"coexec-segment-program": 1, "observed": [{"spec": {}}]}, [], 3],
)
def test_a_file_of_another_form_is_a_program_error(tmp_path: Path, form: object) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps(form))
    with pytest.raises(ProgramError, match=r"program\.json"):
        read_program(path)
