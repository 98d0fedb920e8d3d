"""What both programs are made of: a small network whose middle is a row of cheap operations, another one each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # float32[BATCH, WIDTH] and int64[BATCH]

WIDTH, CLASSES, BATCH = 64, 10, 32
OPERATIONS = 30  # in the middle of a step
PEAK_LR = 1e-2


def same(value: Any) -> Any:
    """The decoration of plain eager: none."""
    return value


def batches(seed: int) -> Iterator[Batch]:
    """Yields random inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        yield torch.randn(BATCH, WIDTH, generator=generator), labels


def make_program(
    seed: int, lr: float | Tensor, decorate: Callable[[Any], Any], middle: Callable[[Tensor], Tensor]
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step whose hidden layer goes through `middle`, the batches, and the model."""
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    @decorate
    def train_step(batch: Batch) -> float:
        inputs, labels = batch
        loss = F.cross_entropy(model[1](middle(model[0](inputs))), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return train_step, batches(seed), model
