"""Each step draws which operations it runs, and in what order: 12 to the power of 30 paths of known operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.new_paths.layers import OPERATIONS, PEAK_LR, Batch, make_program, same

CHOICES: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.tanh(x),
    lambda x: torch.sigmoid(x),
    lambda x: torch.relu(x),
    lambda x: torch.sin(x),
    lambda x: torch.cos(x),
    lambda x: torch.abs(x),
    lambda x: x * 0.9,
    lambda x: x + 0.1,
    lambda x: x - x.mean(),
    lambda x: torch.clamp(x, -2.0, 2.0),
    lambda x: x.flip(0),
    lambda x: torch.nn.functional.softplus(x),
]


def build(
    seed: int = 0, *, decorate: Callable[[Any], Any] = same, lr: float | Tensor = PEAK_LR, steps: int = 0
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step, the batches, and the model; `steps` is not used, the rate is constant."""
    draw = random.Random(seed)

    def middle(x: Tensor) -> Tensor:
        for choice in draw.choices(CHOICES, k=OPERATIONS):
            x = choice(x)
        return x

    return make_program(seed, lr, decorate, middle)
