"""What every family file builds with: the pair a model function returns, and makers of example inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

Inputs = Callable[[int], tuple[Tensor, ...]]
"""Batch size to example inputs."""

Built = tuple[nn.Module, Inputs]
Make = Callable[[], Built]


class Missing(RuntimeError):  # noqa: N818 - reads as a sentence where it is caught
    """The model needs a package that is not installed; the text says which."""


def floats(*shape: int) -> Inputs:
    """One standard normal tensor per sample."""
    return lambda batch: (torch.randn(batch, *shape),)


def images(size: int, channels: int = 3) -> Inputs:
    """Square images, channels first."""
    return floats(channels, size, size)


def tokens(vocabulary: int, length: int) -> Inputs:
    """Sequences of token ids."""
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: Callable[[], nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution with "same" padding, batch norm and activation (none for `None`)."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


def dense(*widths: int, last: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    """A multilayer perceptron of these widths with ReLU between its layers, and `last` after them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([last()] if last else []))


class SqueezeExcite(nn.Module):
    """Channels weighted by a gate over their means (Hu et al. 2018)."""

    def __init__(
        self,
        channels: int,
        inner: int,
        activation: Callable[[], nn.Module] = nn.ReLU,
        gate: Callable[[], nn.Module] = nn.Sigmoid,
    ) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            activation(),
            nn.Conv2d(inner, channels, 1),
            gate(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)
