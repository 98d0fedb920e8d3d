"""Nets whose output is a picture, a map or a set of boxes: segmentation, generation, detection, points."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Make, conv_norm, dense, floats, images
from benchmarks.models.classifiers import Residual


class UNet(nn.Module):
    """Contracting and expanding paths with skips (Ronneberger et al. 2015), padded convolutions."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            [self._double(inputs, outputs) for inputs, outputs in zip([3, *widths], widths, strict=False)]
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList([nn.ConvTranspose2d(deep, shallow, 2, 2) for deep, shallow in pairs])
        self.up = nn.ModuleList([self._double(deep, shallow) for deep, shallow in pairs])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(conv_norm(inputs, outputs), conv_norm(outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], 1))
        return self.head(x)


class Atrous(nn.Module):
    """Dilated branches and the image's mean side by side (DeepLab v3, Chen et al. 2017), then upsampling."""

    def __init__(self, inputs: int, width: int, classes: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [conv_norm(inputs, width, 1)]
            + [
                nn.Sequential(
                    nn.Conv2d(inputs, width, 3, padding=r, dilation=r, bias=False), nn.BatchNorm2d(width), nn.ReLU()
                )
                for r in rates
            ]
        )
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inputs, width, 1), nn.ReLU())
        self.head = nn.Sequential(conv_norm(width * (len(rates) + 2), width, 1), nn.Conv2d(width, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x).expand(-1, -1, *x.shape[2:])
        y = self.head(torch.cat([*(branch(x) for branch in self.branches), mean], 1))
        return F.interpolate(y, scale_factor=8, mode="bilinear", align_corners=False)


class Residue(nn.Module):
    """The residual block of image translation: instance norm, reflected borders."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels)]
        again = [nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels)]
        self.body = nn.Sequential(*half, nn.ReLU(), *again)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class TinyYolo(nn.Module):
    """Two detection heads, the second on upsampled features (YOLOv3-tiny, Redmon and Farhadi 2018)."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
            return conv_norm(inputs, outputs, kernel, activation=lambda: nn.LeakyReLU(0.1))

        outputs = 3 * (classes + 5)
        widths = (3, 16, 32, 64, 128)
        early = [layer for a, b in itertools.pairwise(widths) for layer in (conv(a, b), nn.MaxPool2d(2))]
        self.early = nn.Sequential(*early, conv(128, 256))
        self.late = nn.Sequential(nn.MaxPool2d(2), conv(256, 512), conv(512, 512), conv(512, 256, 1))
        self.coarse = nn.Sequential(conv(256, 512), nn.Conv2d(512, outputs, 1))
        self.lift = nn.Sequential(conv(256, 128, 1), nn.Upsample(scale_factor=2))
        self.fine = nn.Sequential(conv(384, 256), nn.Conv2d(256, outputs, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.early(x)
        late = self.late(early)
        return self.boxes(self.coarse(late)), self.boxes(self.fine(torch.cat([self.lift(late), early], 1)))

    def boxes(self, y: Tensor) -> Tensor:
        """Raw maps to (batch, cells * anchors, 5 + classes): positions and scores through a sigmoid."""
        batch, channels, height, width = y.shape
        y = y.view(batch, 3, channels // 3, height, width).permute(0, 3, 4, 1, 2).reshape(batch, -1, channels // 3)
        return torch.cat([y[..., :2].sigmoid(), y[..., 2:4].exp(), y[..., 4:].sigmoid()], -1)


class PointNet(nn.Module):
    """Points to classes through shared layers and a maximum (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 64, 128, 512)
        pairs = itertools.pairwise(widths)
        self.shared = nn.Sequential(
            *(layer for a, b in pairs for layer in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()))
        )
        self.head = dense(512, 256, 40)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.head(self.shared(x).amax(2)), 1)


class Variational(nn.Module):
    """A convolutional autoencoder with a mean and a deviation; at inference it decodes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv_norm(3, 32, 3, 2), conv_norm(32, 64, 3, 2), nn.Flatten())
        self.mean, self.deviation = nn.Linear(64 * 64, 64), nn.Linear(64 * 64, 64)
        self.decoder = nn.Sequential(
            *(nn.Linear(64, 64 * 64), nn.Unflatten(1, (64, 8, 8)), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.encoder(x)
        mean = self.mean(y)
        return self.decoder(mean), mean, F.softplus(self.deviation(y))


class Field(nn.Module):
    """Position and direction to colour and density with Fourier features (NeRF, Mildenhall et al. 2020)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(2.0 ** torch.arange(6))
        self.early, self.late = dense(39, width, width, width, last=nn.ReLU), dense(width + 39, width, width, width + 1)
        self.colour = dense(width + 39, width // 2, 3, last=nn.Sigmoid)

    def encode(self, x: Tensor) -> Tensor:
        """(..., 3) to (..., 39): the value, sines and cosines of it."""
        angles = (x[..., None] * self.frequencies).flatten(-2)
        return torch.cat([x, angles.sin(), angles.cos()], -1)

    def forward(self, position: Tensor, direction: Tensor) -> Tensor:
        p = self.encode(position)
        y = self.late(torch.cat([self.early(p), p], -1))
        return torch.cat([self.colour(torch.cat([y[..., 1:], self.encode(direction)], -1)), F.relu(y[..., :1])], -1)


def unet() -> Built:
    """Four levels, width 16."""
    return UNet(16, 3, 4), images(96)


def deeplab() -> Built:
    """ResNet-18's first half with atrous branches."""
    trunk = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), Residual(64, 64, 64, 1, 1, False)]
    trunk += [Residual(64, 64, 128, 2, 1, False), Residual(128, 128, 128, 1, 1, False)]
    return nn.Sequential(*trunk, Atrous(128, 64, 21, (2, 4, 6))), images(96)


def dcgan_generator() -> Built:
    """Noise to a 64x64 picture (Radford et al. 2016)."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 256, 4, 1, 0, bias=False), nn.BatchNorm2d(256), nn.ReLU()]
    for inputs, outputs in ((256, 128), (128, 64), (64, 32)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh()), floats(100, 1, 1)


def dcgan_discriminator() -> Built:
    """A 64x64 picture to one probability."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for inputs, outputs in ((32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten()), images(64)


def cyclegan() -> Built:
    """Image translation with instance norm (Zhu et al. 2017), width 16, 4 blocks."""
    return nn.Sequential(
        *(nn.ReflectionPad2d(3), nn.Conv2d(3, 16, 7), nn.InstanceNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.InstanceNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.InstanceNorm2d(64), nn.ReLU(), *(Residue(64) for _ in range(4))),
        *(nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), nn.InstanceNorm2d(32), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), nn.InstanceNorm2d(16), nn.ReLU()),
        *(nn.ReflectionPad2d(3), nn.Conv2d(16, 3, 7), nn.Tanh()),
    ), images(96)


def super_resolution() -> Built:
    """Sub-pixel convolution, factor 3 (Shi et al. 2016)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3)),
    ), images(64, 1)


def yolo_tiny() -> Built:
    """Detection at 128x128."""
    return TinyYolo(), images(128)


def pointnet() -> Built:
    """256 points."""
    return PointNet(), floats(3, 256)


def vae() -> Built:
    """32x32 pictures."""
    return Variational(), images(32)


def nerf() -> Built:
    """256 points per ray bundle."""
    return Field(), lambda batch: (
        torch.rand(batch, 256, 3),
        F.normalize(torch.randn(batch, 256, 3), dim=-1),
    )


MODELS: dict[str, Make] = {
    make.__name__: make
    for make in (
        *(unet, deeplab, dcgan_generator, dcgan_discriminator, cyclegan, super_resolution),
        *(yolo_tiny, pointnet, vae, nerf),
    )
}
