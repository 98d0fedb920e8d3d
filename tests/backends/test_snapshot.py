"""Live inputs survive the way through files: values, geometry, shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coexec.backends.reference import run_reference
from coexec.backends.snapshot import delete_snapshot, read_snapshot, write_snapshot
from tests.backends.programs import PROGRAMS


def test_geometry_and_shared_memory_survive(tmp_path: Path) -> None:
    memory = torch.randn(6, 10)
    tensors = [
        memory[2:4], memory[3:], memory.t(), torch.tensor(2.5, dtype=torch.float64), torch.randn(3, 4).bfloat16(),
        torch.tensor([True, False]), torch.empty(0, 3), torch.randn(2, 1).expand(2, 5), torch.randn(2, 2) * 1j,
    ]  # fmt: skip
    path = tmp_path / "live.json"
    write_snapshot(path, tensors, torch.get_rng_state())
    again, state = read_snapshot(path)
    assert state is not None
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(again, tensors, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
    again[0].zero_()
    assert again[1][0].eq(0).all()
    assert again[2][:, 2:4].eq(0).all()
    delete_snapshot(path)
    assert list(tmp_path.iterdir()) == []


def test_a_slice_of_a_data_set_costs_the_slice(tmp_path: Path) -> None:
    data = torch.randn(10_000, 16)
    path = tmp_path / "batch.json"
    write_snapshot(path, [data[5_001:5_033]], None)
    assert path.with_suffix(".bin").stat().st_size < 3_000
    again, state = read_snapshot(path)
    assert state is None
    assert torch.equal(again[0], data[5_001:5_033])


@pytest.mark.parametrize("name", ["mlp_adamw", "view_soup"])
def test_a_segment_runs_on_a_snapshot_as_on_the_originals(name: str, tmp_path: Path) -> None:
    recording = PROGRAMS[name](mode="functional")
    write_snapshot(tmp_path / "s.json", recording.inputs, recording.rng_before)
    inputs, state = read_snapshot(tmp_path / "s.json")
    assert state is not None
    torch.set_rng_state(state)
    results = run_reference(recording.spec, inputs)
    assert all(torch.equal(a, b) for a, b in zip(results.mutated, recording.mutated, strict=True))


def test_a_short_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    write_snapshot(path, [torch.randn(100)], None)
    path.with_suffix(".bin").write_bytes(b"1234")
    with pytest.raises(EOFError, match="ends before byte 400"):
        read_snapshot(path)
