"""Faster R-CNN (Ren et al. 2015), in the form of the eager implementations: NumPy inside of the forward pass.

Pictures have another size in each batch. The forward pass reads their metadata with `.numpy()`, makes anchors in NumPy
and feeds them back; how many proposals survive, how many boxes there are and how many of each kind are sampled depends
on the data. Non-maximum suppression and RoI align are written out (faster_rcnn_boxes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.faster_rcnn_boxes import anchors_of, clip, decode, encode, iou, nms, roi_align
from benchmarks.programs.program import Program, seed_everything

CLASSES = 4  # the first is the background
STRIDE, ANCHOR_SIZES, ANCHOR_RATIOS = 8, (12.0, 24.0, 40.0), (0.5, 1.0, 2.0)
POOLED = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a detector and its pictures are."""

    width: int = 24
    smallest: int = 80  # height and width of a picture in pixels
    largest: int = 144
    candidates: int = 80  # proposals before suppression
    proposals: int = 24  # and after it
    samples: int = 32  # anchors per picture in the first loss


TINY = Sizes(width=4, smallest=24, largest=40, candidates=16, proposals=6, samples=8)


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture, as detection data sets have one per device and step."""

    image: Tensor  # float32[1, 3, height, width], padded
    meta: Tensor  # float32[3]: height and width without the padding, and the scale by which it was resized
    boxes: Tensor  # float32[boxes, 4], corners in pixels
    classes: Tensor  # int64[boxes], 1 to CLASSES - 1


class Backbone(nn.Module):
    """A small residual net: float32[1, 3, h, w] to float32[1, 8 * width, h / 8, w / 8]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.down1, self.down2 = nn.Conv2d(width, 4 * width, 3, 2, 1), nn.Conv2d(4 * width, 8 * width, 3, 2, 1)
        self.block1 = nn.Sequential(nn.Conv2d(4 * width, 4 * width, 3, 1, 1), nn.GroupNorm(2, 4 * width), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(8 * width, 8 * width, 3, 1, 1), nn.GroupNorm(2, 8 * width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.down1(F.relu(self.stem(x))))
        x = F.relu(self.down2(x + self.block1(x)))
        return x + self.block2(x)


class RegionProposals(nn.Module):
    """The first stage: a score and four offsets per anchor."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        anchors = len(ANCHOR_SIZES) * len(ANCHOR_RATIOS)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.score, self.offsets = nn.Conv2d(channels, anchors, 1), nn.Conv2d(channels, 4 * anchors, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.conv(x))
        offsets = self.offsets(x)
        return self.score(x).permute(0, 2, 3, 1).reshape(-1), offsets.permute(0, 2, 3, 1).reshape(-1, 4)


class BoxHead(nn.Module):
    """The second stage: class logits and offsets of each pooled region."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(channels * POOLED**2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.classes, self.offsets = nn.Linear(128, CLASSES), nn.Linear(128, 4)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(regions.flatten(1))
        return self.classes(x), self.offsets(x)


class FasterRCNN(nn.Module):
    """A picture with its truth to the four losses."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = Backbone(sizes.width)
        self.rpn, self.head = RegionProposals(8 * sizes.width), BoxHead(8 * sizes.width)

    def forward(self, scene: Scene) -> dict[str, Tensor]:
        features = self.backbone(scene.image)
        extent = scene.meta.numpy()[:2]  # what is not padding
        made = anchors_of(features.shape[2:], STRIDE, ANCHOR_SIZES, ANCHOR_RATIOS)
        inside = (made[:, :2] >= 0).all(1) & (made[:, 2] <= extent[1]) & (made[:, 3] <= extent[0])
        anchors, usable = torch.from_numpy(made), torch.from_numpy(inside)
        scores, offsets = self.rpn(features)
        proposals = self.propose(scores, offsets, anchors, extent)
        losses = self.proposal_losses(scores, offsets, anchors, usable, scene.boxes)
        return losses | self.detection_losses(features, proposals, scene)

    @torch.no_grad()
    def propose(self, scores: Tensor, offsets: Tensor, anchors: Tensor, extent: np.ndarray) -> Tensor:
        """Returns the best boxes, float32[n, 4] with n up to `proposals`."""
        best, order = scores.sigmoid().topk(min(self.sizes.candidates, len(scores)))
        boxes = clip(decode(anchors[order], offsets[order]), float(extent[0]), float(extent[1]))
        large = ((boxes[:, 2:] - boxes[:, :2]) >= 2.0).all(1)
        boxes, best = boxes[large], best[large]
        return boxes[nms(boxes, best, 0.7)[: self.sizes.proposals]]

    def proposal_losses(
        self, scores: Tensor, offsets: Tensor, anchors: Tensor, usable: Tensor, boxes: Tensor
    ) -> dict[str, Tensor]:
        """The first stage's losses over a sample of the anchors."""
        overlap = iou(anchors, boxes) * usable.unsqueeze(1)
        best, match = overlap.max(dim=1)
        positive = (best >= 0.6) | ((overlap == overlap.amax(0)) & (overlap > 0.1)).any(dim=1)
        chosen, background = sample(positive, (best < 0.3) & usable & ~positive, self.sizes.samples)
        both = torch.cat([chosen, background])
        wanted = torch.cat([torch.ones(len(chosen)), torch.zeros(len(background))])
        offset_loss = F.smooth_l1_loss(
            offsets[chosen], encode(anchors[chosen], boxes[match[chosen]]), beta=1 / 9, reduction="sum"
        )
        return {
            "rpn_score": F.binary_cross_entropy_with_logits(scores[both], wanted),
            "rpn_offset": offset_loss / max(1, len(both)),
        }

    def detection_losses(self, features: Tensor, proposals: Tensor, scene: Scene) -> dict[str, Tensor]:
        """The second stage's losses; the true boxes are among the proposals, as in the reference implementation."""
        regions = torch.cat([proposals, scene.boxes])
        best, match = iou(regions, scene.boxes).max(dim=1)
        foreground, background = sample(best >= 0.5, best < 0.5, self.sizes.proposals)
        chosen = torch.cat([foreground, background])
        classes = scene.classes[match[chosen]]
        classes[len(foreground) :] = 0
        logits, offsets = self.head(roi_align(features[0], regions[chosen], 1.0 / STRIDE, POOLED))
        wanted = encode(regions[foreground], scene.boxes[match[foreground]])
        offset_loss = F.smooth_l1_loss(offsets[: len(foreground)], wanted, reduction="sum") / max(1, len(chosen))
        return {"class": F.cross_entropy(logits, classes), "offset": offset_loss}


def sample(positive: Tensor, negative: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draws up to `count` places, at most half of them positive; returns the positive and the negative ones."""
    first, second = positive.nonzero().squeeze(1), negative.nonzero().squeeze(1)
    kept = min(count // 2, first.numel())
    rest = min(count - kept, second.numel())
    return first[torch.randperm(first.numel())[:kept]], second[torch.randperm(second.numel())[:rest]]


def scenes(seed: int, sizes: Sizes) -> Iterator[Scene]:
    """Yields pictures of bright rectangles whose brightness tells their class, for ever; sizes are drawn anew."""
    generator = np.random.default_rng(seed)
    while True:
        height, width = generator.integers(sizes.smallest, sizes.largest + 1, 2)
        padded = [int(np.ceil(extent / STRIDE) * STRIDE) for extent in (height, width)]
        image = np.zeros((3, *padded), dtype=np.float32)
        image[:, :height, :width] = 0.1 * generator.standard_normal((3, height, width))
        count = int(generator.integers(1, 5))
        extents = generator.uniform(0.2, 0.5, (count, 2)) * (width, height)
        starts = generator.uniform(0.0, 1.0, (count, 2)) * ((width, height) - extents)
        boxes = np.concatenate([starts, starts + extents], axis=1).astype(np.float32)
        classes = generator.integers(1, CLASSES, count)
        for (x1, y1, x2, y2), kind in zip(boxes.astype(int), classes, strict=True):
            image[:, y1:y2, x1:x2] += 0.5 * kind
        meta = torch.tensor([height, width, 1.0], dtype=torch.float32)
        yield Scene(torch.from_numpy(image)[None], meta, torch.from_numpy(boxes), torch.from_numpy(classes))


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    sizes = TINY if tiny else Sizes()
    model = FasterRCNN(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)
    history: list[dict[str, float]] = []

    def step(scene: Scene) -> float:
        losses = model(scene)
        loss = sum(losses.values(), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        history.append({name: value.item() for name, value in losses.items()})
        return sum(history[-1].values())

    return Program(step, scenes(seed, sizes), {"model": model}, {"optimizer": optimizer}, {"history": history})
