"""Stochastic downsampling (SDPoint; Kuen et al. 2018): each step shrinks the maps at another place of the net.

Before each step Python's random generator draws the block after which the maps shrink, and by how much, or none at
all: 16 blocks times 2 ratios and the full net are 33 paths, with other sizes on each.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs import resnet
from benchmarks.programs.program import Program, seed_everything

CLASSES = 10
RATIOS = (0.5, 0.75)


class SDPointResNet50(nn.Module):
    """ResNet-50 that shrinks its maps after block `point` (None: nowhere) to `ratio` times their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = resnet.stem(width)
        self.blocks = nn.ModuleList(block for blocks in resnet.stages(width) for block in blocks)
        self.head = nn.Linear(resnet.features(width), CLASSES)
        self.point: int | None = None
        self.ratio = 1.0

    def draw_point(self) -> None:
        """Draws this step's path, all of them equally likely."""
        choice = random.randrange(len(self.blocks) * len(RATIOS) + 1)
        if choice == len(self.blocks) * len(RATIOS):
            self.point, self.ratio = None, 1.0
        else:
            self.point, self.ratio = choice // len(RATIOS), RATIOS[choice % len(RATIOS)]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.draw_point()
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.point:
                size = max(1, round(x.size(2) * self.ratio)), max(1, round(x.size(3) * self.ratio))
                x = F.adaptive_avg_pool2d(x, size)
        return self.head(x.mean((2, 3)))


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, size, batch = (4, 32, 4) if tiny else (16, 48, 8)
    model = SDPointResNet50(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    points: list[tuple[int | None, float]] = []

    def step(pictures: resnet.Batch) -> Tensor:
        images, labels = pictures
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        points.append((model.point, model.ratio))
        return loss.detach()

    batches = resnet.pictures(seed, batch, size, CLASSES)
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, {"points": points})
