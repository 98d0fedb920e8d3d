"""Boxes of Faster R-CNN: anchors, overlap, coding, non-maximum suppression and RoI align, as plain array code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGEST_STRETCH = math.log(1000.0 / 16.0)  # keeps exp() of an untrained prediction finite


def anchors_of(extent: Sequence[int], stride: int, sizes: Sequence[float], ratios: Sequence[float]) -> np.ndarray:
    """Returns float32[rows * columns * sizes * ratios, 4]: corners in pixels, around the centre of each place."""
    rows, columns = extent
    ys, xs = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    centres = (np.stack([xs, ys], axis=-1).reshape(-1, 1, 2) + 0.5) * stride
    scales, shapes = np.meshgrid(sizes, np.sqrt(ratios), indexing="ij")
    half = np.stack([scales / shapes, scales * shapes], axis=-1).reshape(1, -1, 2) / 2
    return np.concatenate([centres - half, centres + half], axis=-1).reshape(-1, 4).astype(np.float32)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Returns the overlap of each pair of boxes: float32[n, 4] and [m, 4] to [n, m]."""
    sides = (torch.minimum(a[:, None, 2:], b[None, :, 2:]) - torch.maximum(a[:, None, :2], b[None, :, :2])).clamp(min=0)
    shared = sides[..., 0] * sides[..., 1]
    area_a, area_b = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (a, b))
    return shared / (area_a[:, None] + area_b[None] - shared + 1e-9)


def encode(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Returns the offsets that turn `anchors` into `boxes`, float32[n, 4] each."""
    size, wanted = anchors[:, 2:] - anchors[:, :2], boxes[:, 2:] - boxes[:, :2]
    shift = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / size
    return torch.cat([shift, (wanted / size).clamp(min=1e-3).log()], dim=1)


def decode(anchors: Tensor, offsets: Tensor) -> Tensor:
    """The inverse of `encode`."""
    size, centre = anchors[:, 2:] - anchors[:, :2], (anchors[:, :2] + anchors[:, 2:]) / 2
    centre = centre + offsets[:, :2] * size
    half = size * offsets[:, 2:].clamp(max=LARGEST_STRETCH).exp() / 2
    return torch.cat([centre - half, centre + half], dim=1)


def clip(boxes: Tensor, height: float, width: float) -> Tensor:
    """Returns the boxes' parts inside of the picture."""
    xs, ys = boxes[:, 0::2].clamp(0.0, width), boxes[:, 1::2].clamp(0.0, height)
    return torch.stack([xs[:, 0], ys[:, 0], xs[:, 1], ys[:, 1]], dim=1)


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Keeps the best box, drops what overlaps it by more than `threshold`, and so on; returns int64[kept]."""
    order = scores.argsort(descending=True)
    kept = []
    while order.numel() > 0:
        best, order = order[0], order[1:]
        kept.append(best)
        order = order[iou(boxes[best][None], boxes[order])[0] <= threshold]
    return torch.stack(kept) if kept else order


def roi_align(features: Tensor, boxes: Tensor, scale: float, pooled: int, samples: int = 2) -> Tensor:
    """Returns float32[n, channels, pooled, pooled]: the mean of samples^2 bilinear samples in each cell of each box.

    Args:
        features: float32[channels, h, w].
        boxes: float32[n, 4], corners in pixels.
        scale: features per pixel.
    """
    start = boxes[:, :2] * scale - 0.5
    cell = (boxes[:, 2:] - boxes[:, :2]) * scale / pooled
    steps = (torch.arange(pooled * samples) + 0.5) / samples
    xs, ys = (start[:, k, None] + cell[:, k, None] * steps for k in (0, 1))
    sampled = bilinear(features, ys, xs)
    B, C = sampled.shape[:2]
    return sampled.view(B, C, pooled, samples, pooled, samples).mean((3, 5))


def bilinear(features: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """Returns `features` at the crossings of rows ys and columns xs, float32[n, k] each: float32[n, channels, k, k]."""
    h, w = features.shape[1:]
    ys, xs = ys.clamp(0, h - 1), xs.clamp(0, w - 1)
    top, left = ys.floor().long(), xs.floor().long()
    bottom, right = (top + 1).clamp(max=h - 1), (left + 1).clamp(max=w - 1)
    down, across = (ys - top)[:, :, None], (xs - left)[:, None, :]

    def at(rows: Tensor, columns: Tensor) -> Tensor:
        return features[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)

    down, across = down.unsqueeze(1), across.unsqueeze(1)
    upper = at(top, left) * (1 - across) + at(top, right) * across
    lower = at(bottom, left) * (1 - across) + at(bottom, right) * across
    return upper * (1 - down) + lower * down
