"""A candidate against eager: values, dtypes, sizes, strides, several calls, other inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.candidate import Candidate, Runner
from coexec.backends.candidates.program import Program

THREADS = 2


def built(candidate: Candidate, program: Program, folder: Path, *, threads: int = THREADS) -> Runner:
    """Build, then load what was stored, from read-only files as a store hands them out."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = candidate.build(program, folder, threads=threads, budget_s=20)
    for file in folder.iterdir():
        assert file.is_file(), f"{file}: artifacts are flat files"
        file.chmod(0o400)
    return candidate.load(folder, metadata, program, threads=threads)


def fresh_inputs(program: Program, seed: int) -> tuple[Any, ...]:
    """Other values for what is not static; integers stay in range by shuffling."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        value if position in program.static_inputs or not isinstance(value, torch.Tensor) else _other(value, generator)
        for position, value in enumerate(program.inputs)
    )


def _other(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    result = value.clone()
    if value.numel() and value.is_floating_point():
        result.copy_(torch.randn(value.shape, generator=generator))
    elif value.numel():
        result.copy_(value.reshape(-1)[torch.randperm(value.numel(), generator=generator)].view(value.shape))
    return result


def assert_same_as_eager(run: Runner, program: Program, *, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """Every call, and every earlier result again after the later calls (memory must not be reused)."""
    kept = []
    for seed in seeds:
        inputs = fresh_inputs(program, seed)
        got, expected = run(*inputs), program.run_eagerly(*inputs)
        kept.append((got, expected))
    for got, expected in kept:
        assert len(got) == len(expected)
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            _assert_same(a, b, f"output {index}")


def _assert_same(got: Any, expected: Any, where: str) -> None:
    if not isinstance(expected, torch.Tensor):
        assert got == expected, where
        return
    assert isinstance(got, torch.Tensor), where
    assert got.dtype == expected.dtype, where
    assert got.shape == expected.shape, where
    assert got.stride() == expected.stride(), where
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, msg=lambda text: f"{where}: {text}")
