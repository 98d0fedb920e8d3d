"""A small multi-layer perceptron with AdamW: a step of a millisecond, most of which is Python and dispatch.

`build` has the signature of examples/demo/gpt.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # float32[batch, WIDTH] and int64[batch]

WIDTH, LAYERS, CLASSES, BATCH = 64, 3, 10, 32
PEAK_LR = 1e-3


def same(value: Any) -> Any:
    """The decoration of plain eager: none."""
    return value


def make_model() -> nn.Module:
    """Returns LAYERS blocks of Linear, LayerNorm and GELU, and a head."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def batches(seed: int) -> Iterator[Batch]:
    """Yields inputs with labels that a fixed random projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(WIDTH, CLASSES, generator=generator)
    while True:
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        yield inputs, (inputs @ projection).argmax(1)


def build(
    seed: int = 0,
    *,
    decorate: Callable[[Any], Any] = same,
    compile_model: Callable[[Any], Any] = same,
    compile_update: Callable[[Any], Any] = same,
    lr: float | Tensor = PEAK_LR,
    steps: int = 0,
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step, the batches, and the model; `steps` is not used, the rate is constant."""
    torch.manual_seed(seed)
    model = make_model()
    forward = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    update = compile_update(optimizer.step)

    @decorate
    def train_step(batch: Batch) -> float:
        inputs, labels = batch
        loss = F.cross_entropy(forward(inputs), labels)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss.item()

    return train_step, batches(seed), model
