"""ResNet-50 on small pictures: SGD with momentum, cosine schedule, label smoothing, random flips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs import resnet
from benchmarks.programs.program import Program, seed_everything

CLASSES, LOG_EVERY, STEPS = 10, 10, 10_000


class ResNet50(nn.Module):
    """Pictures float32[batch, 3, size, size] to logits float32[batch, CLASSES]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = resnet.stem(width)
        self.stages = nn.Sequential(*(nn.Sequential(*blocks) for blocks in resnet.stages(width)))
        self.head = nn.Linear(resnet.features(width), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def flip_half(images: Tensor) -> Tensor:
    """Mirrors each picture with probability one half."""
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, size, batch = (4, 32, 4) if tiny else (16, 48, 8)
    model = ResNet50(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    accuracies: list[float] = []
    done = 0

    def step(pictures: resnet.Batch) -> Tensor:
        nonlocal done
        images, labels = pictures
        logits = model(flip_half(images))
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
        if done % LOG_EVERY == 0:
            accuracies.append((logits.argmax(1) == labels).float().mean().item())
        return loss.detach()

    batches = resnet.pictures(seed, batch, size, CLASSES)
    extras = {"schedule": schedule, "accuracies": accuracies}
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, extras)
