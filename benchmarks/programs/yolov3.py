"""YOLOv3 (Redmon and Farhadi 2018): Darknet-53 with few channels, three scales, the loss written out.

The loader places the true boxes on the grids, as most implementations do; the step sees tensors of fixed sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

CLASSES, MOST_BOXES = 4, 6
ANCHORS = ((0.55, 0.45), (0.40, 0.55), (0.30, 0.35), (0.22, 0.18), (0.15, 0.25), (0.12, 0.12), (0.08, 0.10),
           (0.05, 0.08), (0.04, 0.04))  # fmt: skip  # width and height by the picture's, largest first
PER_SCALE, STRIDES = 3, (32, 16, 8)
IGNORE_IOU = 0.5


class Batch(NamedTuple):
    """Pictures and what is on them."""

    images: Tensor  # float32[batch, 3, size, size]
    boxes: Tensor  # float32[batch, MOST_BOXES, 4]: corners in shares of the picture; zeros where there is no box
    grids: list[Tensor]  # per scale float32[batch, PER_SCALE, g, g, 5 + CLASSES]: centre, size, presence, class


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, norm, leaky ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1))


class Residual(nn.Module):
    """1x1 to half the channels, 3x3 back, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels // 2, 1), conv(channels // 2, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Darknet53(nn.Module):
    """Returns the maps of strides 8, 16 and 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = conv(3, width, 3)
        stages, channels = [], width
        for depth in (1, 2, 8, 8, 4):
            blocks = [Residual(2 * channels) for _ in range(depth)]
            stages.append(nn.Sequential(conv(channels, 2 * channels, 3, stride=2), *blocks))
            channels *= 2
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps[2:]


class Neck(nn.Module):
    """Five convolutions, and the head of one scale: returns what the next scale gets, and the raw predictions."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        layers = [conv(inputs, channels, 1)]
        for _ in range(2):
            layers += [conv(channels, 2 * channels, 3), conv(2 * channels, channels, 1)]
        self.body = nn.Sequential(*layers)
        outputs = PER_SCALE * (5 + CLASSES)
        self.head = nn.Sequential(conv(channels, 2 * channels, 3), nn.Conv2d(2 * channels, outputs, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        B, _, g, _ = x.shape
        raw = self.head(x).view(B, PER_SCALE, 5 + CLASSES, g, g)
        return x, raw.permute(0, 1, 3, 4, 2)


class YOLOv3(nn.Module):
    """Pictures to raw predictions, coarse scale first: float32[batch, PER_SCALE, g, g, 5 + CLASSES] each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.backbone = Darknet53(width)
        self.coarse = Neck(32 * width, 16 * width)
        self.up1, self.middle = conv(16 * width, 8 * width, 1), Neck(24 * width, 8 * width)
        self.up2, self.fine = conv(8 * width, 4 * width, 1), Neck(12 * width, 4 * width)

    def forward(self, x: Tensor) -> list[Tensor]:
        c3, c4, c5 = self.backbone(x)
        x, coarse = self.coarse(c5)
        x, middle = self.middle(torch.cat([F.interpolate(self.up1(x), scale_factor=2.0), c4], dim=1))
        _, fine = self.fine(torch.cat([F.interpolate(self.up2(x), scale_factor=2.0), c3], dim=1))
        return [coarse, middle, fine]


def corners(centres: Tensor, sizes: Tensor) -> Tensor:
    """Returns boxes as their two corners, float32[..., 4]."""
    return torch.cat([centres - sizes / 2, centres + sizes / 2], dim=-1)


def best_overlap(predicted: Tensor, boxes: Tensor) -> Tensor:
    """Returns each prediction's largest IoU with a true box: float32[batch, n, 4] and [batch, m, 4] to [batch, n]."""
    a, b = predicted.unsqueeze(2), boxes.unsqueeze(1)
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    shared = sides.prod(-1)
    area_a, area_b = (a[..., 2:] - a[..., :2]).prod(-1), (b[..., 2:] - b[..., :2]).prod(-1)
    return (shared / (area_a + area_b - shared + 1e-9)).amax(-1)


def scale_loss(raw: Tensor, grid: Tensor, boxes: Tensor, anchors: Tensor) -> Tensor:
    """The loss of one scale: coordinates, presence and class (YOLOv3, section 2)."""
    g = raw.size(2)
    cells = torch.arange(g, dtype=raw.dtype)
    offsets = torch.stack(torch.meshgrid(cells, cells, indexing="xy"), dim=-1)
    centres = (raw[..., :2].sigmoid() + offsets) / g
    sizes = raw[..., 2:4].clamp(max=4.0).exp() * anchors.view(1, PER_SCALE, 1, 1, 2)
    present = grid[..., 4]
    with torch.no_grad():
        overlap = best_overlap(corners(centres, sizes).flatten(1, 3), boxes).view_as(present)
        absent = (1.0 - present) * (overlap < IGNORE_IOU)
    weight = present * (2.0 - grid[..., 2] * grid[..., 3])  # small boxes count more
    wanted = (grid[..., 2:4].clamp(min=1e-6) / anchors.view(1, PER_SCALE, 1, 1, 2)).log()
    place = weight * (raw[..., :2].sigmoid() - (grid[..., :2] * g - offsets)).square().sum(-1)
    size = weight * (raw[..., 2:4] - wanted).square().sum(-1)
    presence = F.binary_cross_entropy_with_logits(raw[..., 4], present, reduction="none") * (present + absent)
    kind = F.binary_cross_entropy_with_logits(raw[..., 5:], grid[..., 5:], reduction="none").sum(-1) * present
    return (place + size + presence + kind).sum((1, 2, 3)).mean()


def place_on_grids(boxes: Tensor, classes: Tensor, size: int) -> list[Tensor]:
    """Puts each box of one picture on the cell and the anchor that fit it best; returns one grid per scale."""
    grids = [torch.zeros(PER_SCALE, size // stride, size // stride, 5 + CLASSES) for stride in STRIDES]
    anchors = torch.tensor(ANCHORS)
    for box, kind in zip(boxes, classes, strict=True):
        centre, extent = (box[:2] + box[2:]) / 2, box[2:] - box[:2]
        shared = torch.minimum(anchors, extent).prod(-1)
        best = int((shared / (anchors.prod(-1) + extent.prod() - shared)).argmax())
        grid = grids[best // PER_SCALE]
        column, row = (centre * grid.size(1)).long().tolist()
        grid[best % PER_SCALE, row, column] = torch.cat([centre, extent, torch.ones(1), F.one_hot(kind, CLASSES)])
    return grids


def scenes(seed: int, batch: int, size: int) -> Iterator[Batch]:
    """Yields pictures of one to MOST_BOXES bright rectangles, whose brightness tells their class, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        images = 0.1 * torch.randn(batch, 3, size, size, generator=generator)
        all_boxes, all_grids = torch.zeros(batch, MOST_BOXES, 4), []
        for image, padded in zip(images, all_boxes, strict=True):
            count = int(torch.randint(1, MOST_BOXES + 1, (1,), generator=generator))
            extents = 0.06 + 0.3 * torch.rand(count, 2, generator=generator)
            starts = torch.rand(count, 2, generator=generator) * (1.0 - extents)
            boxes = torch.cat([starts, starts + extents], dim=1)
            classes = torch.randint(CLASSES, (count,), generator=generator)
            for (x1, y1, x2, y2), kind in zip((boxes * size).long().tolist(), classes.tolist(), strict=True):
                image[:, y1 : y2 + 1, x1 : x2 + 1] += 0.5 + 0.5 * kind
            padded[:count] = boxes
            all_grids.append(place_on_grids(boxes, classes, size))
        yield Batch(images, all_boxes, [torch.stack(grids) for grids in zip(*all_grids, strict=True)])


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, size, batch = (2, 64, 2) if tiny else (6, 96, 4)
    model = YOLOv3(width)
    anchors = torch.tensor(ANCHORS).view(len(STRIDES), PER_SCALE, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[list[float]] = []

    def step(scene: Batch) -> float:
        optimizer.zero_grad()
        outputs = model(scene.images)
        parts = [
            scale_loss(raw, grid, scene.boxes, anchors[scale])
            for scale, (raw, grid) in enumerate(zip(outputs, scene.grids, strict=True))
        ]
        loss = sum(parts[1:], parts[0])
        loss.backward()
        optimizer.step()
        losses.append([part.item() for part in parts])
        return sum(losses[-1])

    return Program(step, scenes(seed, batch, size), {"model": model}, {"optimizer": optimizer}, {"losses": losses})
