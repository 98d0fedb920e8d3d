"""Image classifiers made for small devices, and the convolutional nets that followed them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.models.build import Built, Make, SqueezeExcite, conv_norm, images
from benchmarks.models.classifiers import CLASSES

Activation = Callable[[], nn.Module]


def rounded(channels: float) -> int:
    """The nearest multiple of 8, as these nets round their widths."""
    return max(8, int(channels + 4) // 8 * 8)


class InvertedResidual(nn.Module):
    """Expand, depthwise, optional gate, project (Sandler et al. 2018; Howard et al. 2019)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        inner: int,
        kernel: int,
        stride: int,
        activation: Activation,
        squeeze: nn.Module | None = None,
    ) -> None:
        super().__init__()
        expand = [conv_norm(inputs, inner, 1, activation=activation)] if inner != inputs else []
        self.body = nn.Sequential(
            *expand,
            conv_norm(inner, inner, kernel, stride, inner, activation),
            *([squeeze] if squeeze is not None else []),
            conv_norm(inner, outputs, 1, activation=None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class ShuffleUnit(nn.Module):
    """One half of the channels passes, the other is convolved, both are shuffled (Ma et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half, self.stride = outputs // 2, stride
        taken = inputs if stride == 2 else inputs // 2
        self.right = nn.Sequential(
            conv_norm(taken, half, 1), conv_norm(half, half, 3, stride, half, None), conv_norm(half, half, 1)
        )
        self.left = (
            nn.Sequential(conv_norm(inputs, inputs, 3, 2, inputs, None), conv_norm(inputs, half, 1))
            if stride == 2
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride == 2 else x.chunk(2, 1)
        joined = torch.cat([self.left(left), self.right(right)], 1)
        batch, channels, height, width = joined.shape
        return joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, layer norm, pointwise MLP, layer scale (Liu et al. 2022)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.Module):
    """Layer norm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def classifier(stem: nn.Module, blocks: list[nn.Module], *head: nn.Module, size: int) -> Built:
    """Stem, blocks, then the head after pooling."""
    return nn.Sequential(stem, *blocks, *head), images(size)


def pooled(channels: int) -> tuple[nn.Module, ...]:
    """Mean over the image, dropout and one linear layer."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, CLASSES)


def mobilenet_v1() -> Built:
    """Depthwise separable convolutions (Howard et al. 2017)."""
    blocks: list[nn.Module] = []
    inputs = 32
    for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2)):
        blocks += [conv_norm(inputs, inputs, 3, stride, inputs), conv_norm(inputs, outputs, 1)]
        inputs = outputs
    return classifier(conv_norm(3, 32, 3, 2), blocks, *pooled(1024), size=128)


def mobilenet_v2() -> Built:
    """MobileNet v2, width 1."""
    blocks: list[nn.Module] = []
    inputs = 32
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for factor, outputs, depth, stride in table:
        for number in range(depth):
            step = stride if number == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, factor * inputs, 3, step, nn.ReLU6))
            inputs = outputs
    head = conv_norm(320, 1280, 1, activation=nn.ReLU6)
    return classifier(conv_norm(3, 32, 3, 2, activation=nn.ReLU6), blocks, head, *pooled(1280), size=128)


V3Row = tuple[int, int, int, bool, Activation, int]
"""Kernel, expanded width, output width, gate, activation, stride."""

R, H = nn.ReLU, nn.Hardswish
V3_SMALL: tuple[V3Row, ...] = (
    *((3, 16, 16, True, R, 2), (3, 72, 24, False, R, 2), (3, 88, 24, False, R, 1), (5, 96, 40, True, H, 2)),
    *((5, 240, 40, True, H, 1), (5, 240, 40, True, H, 1), (5, 120, 48, True, H, 1), (5, 144, 48, True, H, 1)),
    *((5, 288, 96, True, H, 2), (5, 576, 96, True, H, 1), (5, 576, 96, True, H, 1)),
)
V3_LARGE: tuple[V3Row, ...] = (
    *((3, 16, 16, False, R, 1), (3, 64, 24, False, R, 2), (3, 72, 24, False, R, 1), (5, 72, 40, True, R, 2)),
    *((5, 120, 40, True, R, 1), (5, 120, 40, True, R, 1), (3, 240, 80, False, H, 2), (3, 200, 80, False, H, 1)),
    *((3, 184, 80, False, H, 1), (3, 184, 80, False, H, 1), (3, 480, 112, True, H, 1), (3, 672, 112, True, H, 1)),
    *((5, 672, 160, True, H, 2), (5, 960, 160, True, H, 1), (5, 960, 160, True, H, 1)),
)


def mobilenet_v3(table: tuple[V3Row, ...], hidden: int) -> Built:
    """MobileNet v3 from its table (Howard et al. 2019)."""
    blocks: list[nn.Module] = []
    inputs = 16
    for kernel, inner, outputs, gated, activation, stride in table:
        gate = SqueezeExcite(inner, rounded(inner / 4), gate=nn.Hardsigmoid) if gated else None
        blocks.append(InvertedResidual(inputs, outputs, inner, kernel, stride, activation, gate))
        inputs = outputs
    last = table[-1][1]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, hidden), nn.Hardswish(), nn.Dropout(0.2))
    return classifier(
        conv_norm(3, 16, 3, 2, activation=H),
        blocks,
        conv_norm(inputs, last, 1, activation=H),
        *head,
        nn.Linear(hidden, CLASSES),
        size=128,
    )


def mobilenet_v3_small() -> Built:
    """The small table."""
    return mobilenet_v3(V3_SMALL, 1024)


def mobilenet_v3_large() -> Built:
    """The large table."""
    return mobilenet_v3(V3_LARGE, 1280)


def efficientnet_b0() -> Built:
    """EfficientNet-B0 (Tan and Le 2019)."""
    blocks: list[nn.Module] = []
    inputs = 32
    table = ((1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1))
    for factor, kernel, outputs, depth, stride in (*table, (6, 5, 192, 4, 2), (6, 3, 320, 1, 1)):
        for number in range(depth):
            gate = SqueezeExcite(factor * inputs, inputs // 4, nn.SiLU)
            step = stride if number == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, factor * inputs, kernel, step, nn.SiLU, gate))
            inputs = outputs
    head = conv_norm(320, 1280, 1, activation=nn.SiLU)
    return classifier(conv_norm(3, 32, 3, 2, activation=nn.SiLU), blocks, head, *pooled(1280), size=128)


def mnasnet() -> Built:
    """MnasNet-B1 (Tan et al. 2019)."""
    blocks: list[nn.Module] = [conv_norm(32, 32, 3, 1, 32), conv_norm(32, 16, 1, activation=None)]
    inputs = 16
    for factor, kernel, outputs, depth, stride in ((3, 3, 24, 3, 2), (3, 5, 40, 3, 2), (6, 5, 80, 3, 2)):
        for number in range(depth):
            step = stride if number == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, factor * inputs, kernel, step, nn.ReLU))
            inputs = outputs
    return classifier(conv_norm(3, 32, 3, 2), blocks, conv_norm(80, 640, 1), *pooled(640), size=128)


def shufflenet_v2() -> Built:
    """ShuffleNet v2, width 1."""
    blocks: list[nn.Module] = []
    inputs = 24
    for outputs, depth in ((116, 4), (232, 8), (464, 4)):
        blocks += [ShuffleUnit(inputs, outputs, 2), *(ShuffleUnit(outputs, outputs, 1) for _ in range(depth - 1))]
        inputs = outputs
    stem = nn.Sequential(conv_norm(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1))
    return classifier(stem, blocks, conv_norm(464, 1024, 1), *pooled(1024), size=128)


def convnext() -> Built:
    """ConvNeXt with half of Tiny's widths (its depths are 3-3-9-3)."""
    blocks: list[nn.Module] = []
    widths = (48, 96, 192, 384)
    for stage, (width, depth) in enumerate(zip(widths, (3, 3, 9, 3), strict=True)):
        if stage:
            blocks += [ChannelsFirstNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
        blocks += [ConvNextBlock(width) for _ in range(depth)]
    stem = nn.Sequential(nn.Conv2d(3, 48, 4, 4), ChannelsFirstNorm(48))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(384, eps=1e-6), nn.Linear(384, CLASSES))
    return classifier(stem, blocks, *head, size=128)


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(mobilenet_v1, mobilenet_v2, mobilenet_v3_small, mobilenet_v3_large),
        *(efficientnet_b0, mnasnet, shufflenet_v2, convnext),
    )
}
