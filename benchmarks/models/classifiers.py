"""Convolutional image classifiers of 1998 to 2016, written from their papers' tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Make, conv_norm, dense, images

CLASSES = 1000


class Residual(nn.Module):
    """Basic or bottleneck block (He et al. 2016); with groups it is ResNeXt's (Xie et al. 2017)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            self.body = nn.Sequential(
                conv_norm(inputs, width, 1),
                conv_norm(width, width, 3, stride, groups),
                conv_norm(width, outputs, 1, activation=None),
            )
        else:
            self.body = nn.Sequential(
                conv_norm(inputs, outputs, 3, stride), conv_norm(outputs, outputs, 3, activation=None)
            )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, mean, linear."""

    def __init__(self, depths: tuple[int, ...], bottleneck: bool, groups: int = 1, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(depths):
            inner, outputs = width << stage, (256 if bottleneck else 64) << stage
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(Residual(inputs, inner, outputs, stride, groups, bottleneck))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class DenseLayer(nn.Module):
    """Norm, 1x1, norm, 3x3; the result is appended to its input (Huang et al. 2017)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class Fire(nn.Module):
    """Squeeze to few channels, expand by 1x1 and 3x3 (Iandola et al. 2016)."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.one, self.three = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class Inception(nn.Module):
    """Four branches of different reach side by side (Szegedy et al. 2015, with batch norm)."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                conv_norm(inputs, one, 1),
                nn.Sequential(conv_norm(inputs, three[0], 1), conv_norm(*three, 3)),
                nn.Sequential(conv_norm(inputs, five[0], 1), conv_norm(*five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def resnet18() -> Built:
    """Basic blocks, 2-2-2-2."""
    return ResNet((2, 2, 2, 2), bottleneck=False), images(128)


def resnet50() -> Built:
    """Bottleneck blocks, 3-4-6-3."""
    return ResNet((3, 4, 6, 3), bottleneck=True), images(96)


def resnext50() -> Built:
    """ResNeXt-50 32x4d: grouped bottlenecks."""
    return ResNet((3, 4, 6, 3), bottleneck=True, groups=32, width=128), images(96)


def lenet() -> Built:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling."""
    convolutions = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), dense(400, 120, 84, 10)), images(28, 1)


def alexnet() -> Built:
    """AlexNet (Krizhevsky et al. 2012), classifier of a quarter of the width."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(256 * 9, 1024), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)),
    ), images(128)


def vgg(widths: tuple[int | str, ...], size: int) -> Built:
    """VGG with batch norm (Simonyan and Zisserman 2015); "M" is a pooling. One linear layer as its head."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        if isinstance(width, int):
            layers.append(conv_norm(channels, width))
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(512, CLASSES)), images(
        size
    )


def vgg11() -> Built:
    """Configuration A."""
    return vgg((64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"), 96)


def vgg16() -> Built:
    """Configuration D."""
    return vgg((64, 64, "M", 128, 128, "M", *(256,) * 3, "M", *(512,) * 3, "M", *(512,) * 3, "M"), 64)


def densenet121() -> Built:
    """Dense blocks of 6, 12, 24, 16 layers, growth 32."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for depth in (6, 12, 24, 16):
        layers += [DenseLayer(channels + 32 * number, 32) for number in range(depth)]
        channels += 32 * depth
        if depth != 16:
            transition = (nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False))
            layers += [*transition, nn.AvgPool2d(2)]
            channels //= 2
    head = (nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*layers, *head), images(96)


def squeezenet() -> Built:
    """SqueezeNet 1.1."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(Fire(128, 32, 128), Fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        *(nn.Dropout(), nn.Conv2d(512, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ), images(128)


def googlenet() -> Built:
    """GoogLeNet without its auxiliary heads."""
    return nn.Sequential(
        *(conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), conv_norm(64, 64, 1), conv_norm(64, 192)),
        nn.MaxPool2d(3, 2, 1),
        *(Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64)),
        nn.MaxPool2d(3, 2, 1),
        *(Inception(480, 192, (96, 208), (16, 48), 64), Inception(512, 160, (112, 224), (24, 64), 64)),
        *(Inception(512, 128, (128, 256), (24, 64), 64), Inception(512, 112, (144, 288), (32, 64), 64)),
        *(Inception(528, 256, (160, 320), (32, 128), 128), nn.MaxPool2d(3, 2, 1)),
        *(Inception(832, 256, (160, 320), (32, 128), 128), Inception(832, 384, (192, 384), (48, 128), 128)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, CLASSES)),
    ), images(96)


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (*(lenet, alexnet, vgg11, vgg16, googlenet, resnet18, resnet50, resnext50, densenet121, squeezenet),)
}
