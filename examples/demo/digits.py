"""A small residual network on scikit-learn's 8x8 digits, as a practitioner would train it.

BatchNorm, AdamW with OneCycleLR, mixup on a random half of the steps, `.item()` for the log, accuracy with NumPy.
`decorate`, `compile_model` and `compile_update` are as in gpt.py. Run alone: `python -m examples.demo.digits`.

SiLU and not ReLU: at ReLU's kink a rounding difference becomes a different gradient, and after a hundred steps two
correct runs (float32 and float64, say) are a tenth of the way apart. With SiLU they stay together to six digits, so
that the demo can check that the parameters agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # images float32[batch, 1, 8, 8] in 0..1, and labels int64[batch]

CHANNELS, BATCH = 32, 64
STEPS, PEAK_LR = 300, 3e-3
MIXUP_RATE, MIXUP_ALPHA = 0.5, 0.4
METRIC_EVERY = 10
CLASSES = 10


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut; `stride` 2 halves height and width."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_model() -> nn.Module:
    """Returns the network: images to logits float32[batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.SiLU(),
        Residual(CHANNELS, CHANNELS),
        Residual(CHANNELS, 2 * CHANNELS, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS, CLASSES),
    )


@dataclass
class History:
    """What the step logs."""

    losses: list[float] = field(default_factory=list)  # nats per image
    accuracies: list[float] = field(default_factory=list)  # on the training batch, every METRIC_EVERY steps


def batches(seed: int) -> Iterator[Batch]:
    """Yields shuffled batches, epoch after epoch, for ever; the last, shorter batch of an epoch is dropped."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for chosen in order[: len(order) // BATCH * BATCH].split(BATCH):
            yield images[chosen], labels[chosen]


def same(value: Any) -> Any:
    """The decoration of plain eager: none."""
    return value


def build(
    seed: int = 0,
    *,
    decorate: Callable[[Any], Any] = same,
    compile_model: Callable[[Any], Any] = same,
    compile_update: Callable[[Any], Any] = same,
    lr: float | Tensor = PEAK_LR,
    steps: int = STEPS,
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step, the batches, and the model; the arguments are those of `gpt.build`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = make_model()
    forward = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    # OneCycleLR would also move beta1 at each step, for which torch.compile compiles the update again eight times and
    # then gives up on it; with a constant beta1 the comparison is about speed.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, cycle_momentum=False)
    update = compile_update(optimizer.step)
    history = History()

    @decorate
    def train_step(batch: Batch) -> float:
        images, labels = batch
        if random.random() < MIXUP_RATE:
            share = float(np.random.beta(MIXUP_ALPHA, MIXUP_ALPHA))
            partner = torch.randperm(len(labels))
            logits = forward(share * images + (1.0 - share) * images[partner])
            loss = share * F.cross_entropy(logits, labels) + (1.0 - share) * F.cross_entropy(logits, labels[partner])
        else:
            logits = forward(images)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        update()
        schedule.step()
        optimizer.zero_grad()

        history.losses.append(loss.item())
        if len(history.losses) % METRIC_EVERY == 0:
            guesses = logits.detach().argmax(-1).numpy()
            history.accuracies.append(float(np.mean(guesses == labels.numpy())))
        return history.losses[-1]

    return train_step, batches(seed), model


def main() -> None:
    """Trains eagerly and prints the loss."""
    step, data, _ = build()
    for index, batch in zip(range(STEPS), data, strict=False):
        loss = step(batch)
        if index % 20 == 19:
            print(f"step {index + 1:4d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()
