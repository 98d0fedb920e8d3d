"""ResNet-50 with DropBlock (Ghiasi et al. 2018): whole squares of a map are dropped, more of them as training goes on.

As in the usual implementations, the schedule writes the new probability to the layer objects between two steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs import resnet
from benchmarks.programs.program import Program, seed_everything

CLASSES, LAST_KEEP_PROB = 10, 0.85


class DropBlock(nn.Module):
    """Drops squares of x, float32[batch, channels, h, w]; `keep_prob` and `gamma` are set from outside."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.keep_prob = 1.0
        self.gamma = 0.0  # probability that a square has its centre at a place

    def set_keep_prob(self, keep_prob: float, extent: int) -> None:
        """Sets the share of a map that is kept; `extent` is the map's height and width, which gamma depends on."""
        self.keep_prob = keep_prob
        side = min(self.block_size, extent)
        self.gamma = (1.0 - keep_prob) * extent**2 / side**2 / (extent - side + 1) ** 2

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep_prob == 1.0:
            return x
        side = min(self.block_size, x.size(2))
        centres = torch.bernoulli(torch.full(x.shape, self.gamma))
        dropped = F.max_pool2d(centres, side, stride=1, padding=side // 2)[:, :, : x.size(2), : x.size(3)]
        kept = 1.0 - dropped
        return x * kept * (kept.numel() / kept.sum().clamp(min=1.0))


class Schedule:
    """Lowers keep_prob from 1 to LAST_KEEP_PROB in small steps, on the layers themselves."""

    def __init__(self, layers: dict[DropBlock, int], ramp_steps: int) -> None:
        self.layers = layers  # with the height of its maps
        self.ramp_steps = ramp_steps
        self.steps = 0

    def advance(self) -> None:
        """Called between two training steps."""
        self.steps += 1
        share = min(1.0, self.steps / self.ramp_steps)
        for layer, extent in self.layers.items():
            layer.set_keep_prob(1.0 - share * (1.0 - LAST_KEEP_PROB), extent)

    def now(self) -> tuple[float, float]:
        """Returns keep_prob and the last layer's gamma, for the log."""
        last = [*self.layers][-1]
        return last.keep_prob, last.gamma


class DropBlockResNet50(nn.Module):
    """ResNet-50 with DropBlock after each block of the last two stages."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.stem = resnet.stem(width)
        self.extents: dict[DropBlock, int] = {}
        layers: list[nn.Module] = []
        for stage, blocks in enumerate(resnet.stages(width)):
            for block in blocks:
                layers.append(block)
                if stage >= 2:
                    layers.append(drop := DropBlock(block_size=3))
                    self.extents[drop] = size >> (stage + 1)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(resnet.features(width), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, size, batch, ramp_steps = (4, 32, 4, 10) if tiny else (12, 48, 8, 2_000)
    model = DropBlockResNet50(width, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = Schedule(model.extents, ramp_steps)
    history: list[tuple[float, float]] = []

    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(pictures: resnet.Batch) -> Tensor:
        schedule.advance()
        history.append(schedule.now())
        return train_step(*pictures)

    batches = resnet.pictures(seed, batch, size, CLASSES)
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, {"history": history})
