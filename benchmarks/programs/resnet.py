"""The 16 bottleneck blocks of ResNet-50 (He et al. 2016), with few channels: what three programs are built on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTHS = (3, 4, 6, 3)
EXPANSION = 4

Batch = tuple[Tensor, Tensor]  # float32[batch, 3, size, size] and int64[batch]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut: x of `inputs` channels to EXPANSION * `width` channels."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.norm3.weight)  # a block begins as its shortcut (Goyal et al. 2017)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def stem(width: int) -> nn.Sequential:
    """The entry of the variants for small pictures: one 3x3 convolution with stride 2, no pooling."""
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def stages(width: int) -> list[list[Bottleneck]]:
    """Returns the blocks of the four stages; the first has `width` channels inside, each later one twice as many."""
    made: list[list[Bottleneck]] = []
    inputs = width
    for stage, depth in enumerate(DEPTHS):
        inner = width << stage
        blocks = []
        for number in range(depth):
            blocks.append(Bottleneck(inputs, inner, 2 if stage > 0 and number == 0 else 1))
            inputs = EXPANSION * inner
        made.append(blocks)
    return made


def features(width: int) -> int:
    """Returns the channels after the last stage."""
    return EXPANSION * (width << (len(DEPTHS) - 1))


def pictures(seed: int, batch: int, size: int, classes: int) -> Iterator[Batch]:
    """Yields noisy stripes whose direction and frequency tell the class, for ever."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    while True:
        labels = torch.randint(classes, (batch,), generator=generator)
        angle = (labels * torch.pi / classes).view(-1, 1, 1)
        stripes = torch.sin((rows * torch.cos(angle) + columns * torch.sin(angle)) * 0.9)
        noise = torch.randn(batch, 3, size, size, generator=generator)
        yield stripes.unsqueeze(1) + 0.5 * noise, labels
