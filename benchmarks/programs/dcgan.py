"""DCGAN (Radford et al. 2016) on handwritten digits, as in PyTorch's own tutorial: two models, two optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

SIZE, NOISE = 32, 64
REAL, FAKE = 1.0, 0.0


class Generator(nn.Module):
    """Noise float32[batch, NOISE, 1, 1] to pictures float32[batch, 1, SIZE, SIZE] in (-1, 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.ConvTranspose2d(NOISE, width * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 4), nn.ReLU(True)),
            *(nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(True)),
            *(nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    """Pictures float32[batch, 1, SIZE, SIZE] to the probability that each is real, float32[batch]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(width, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 4), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(width * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid()),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).view(-1)


def initialise(module: nn.Module) -> None:
    """Weights as in the paper."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def digits(seed: int, batch: int) -> Iterator[Tensor]:
    """Yields shuffled digits as float32[batch, 1, SIZE, SIZE] in [-1, 1], for ever."""
    small = torch.tensor(load_digits().images / 8.0 - 1.0, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            if len(chosen) == batch:
                yield images[chosen]


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, batch = (4, 4) if tiny else (24, 24)
    generator, discriminator = Generator(width), Discriminator(width)
    generator.apply(initialise)
    discriminator.apply(initialise)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    history: list[dict[str, float]] = []

    def step(images: Tensor) -> float:
        discriminator.zero_grad()
        label = torch.full((images.size(0),), REAL)
        output = discriminator(images)
        error_real = criterion(output, label)
        error_real.backward()
        d_x = output.mean().item()

        fake = generator(torch.randn(images.size(0), NOISE, 1, 1))
        label.fill_(FAKE)
        output = discriminator(fake.detach())
        error_fake = criterion(output, label)
        error_fake.backward()
        d_g_z1 = output.mean().item()
        error_d = error_real + error_fake
        optimizer_d.step()

        generator.zero_grad()
        label.fill_(REAL)
        output = discriminator(fake)
        error_g = criterion(output, label)
        error_g.backward()
        optimizer_g.step()
        history.append(
            {
                "loss_d": error_d.item(),
                "loss_g": error_g.item(),
                "d_x": d_x,
                "d_g_z1": d_g_z1,
                "d_g_z2": output.mean().item(),
            }
        )
        return history[-1]["loss_g"]

    models: dict[str, nn.Module] = {"generator": generator, "discriminator": discriminator}
    optimizers = {"optimizer_d": optimizer_d, "optimizer_g": optimizer_g}
    return Program(step, digits(seed, batch), models, dict(optimizers), {"history": history})
