"""More inputs of a program from the ones that were recorded: the same values at other places.

Whatever a recorded input says about the values that occur (a range of indices, the share of a mask, the scale of an
activation) holds for its permutations too. Static inputs stay: they are what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coexec.backends.candidates.program import Program
from coexec.tuning.oracle import run_narrow


def input_sets(program: Program, count: int = 2, seed: int = 0) -> list[Sequence[Any]]:
    """The recorded inputs, then up to `count` variations on which eager runs without an error."""
    generator = torch.Generator().manual_seed(seed)
    sets: list[Sequence[Any]] = [program.inputs]
    for _ in range(count):
        varied = varied_inputs(program, generator)
        if _runs(program, varied):
            sets.append(varied)
    return sets


def varied_inputs(program: Program, generator: torch.Generator) -> list[Any]:
    """One variation. Numbers stay: they are sizes."""
    static = set(program.static_inputs)
    return [v if i in static else _permuted(v, generator) for i, v in enumerate(program.inputs)]


def _permuted(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() < 2 or not _is_dense(value):
        return value
    order = torch.randperm(value.numel(), generator=generator)
    varied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    varied.copy_(value.detach().reshape(-1)[order].reshape(value.shape))
    return varied


def _is_dense(tensor: torch.Tensor) -> bool:
    """No element lies at two places, so that it can be written (an expanded tensor cannot)."""
    return all(n == 1 or s != 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _runs(program: Program, inputs: Sequence[Any]) -> bool:
    """Permuted offsets or lengths may be no valid input: then eager says so, and nothing can be compared."""
    state = torch.get_rng_state()
    try:
        run_narrow(program, inputs)
    except (RuntimeError, IndexError, ValueError):
        return False
    finally:
        torch.set_rng_state(state)
    return True
