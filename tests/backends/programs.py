"""Real training steps, recorded: each function gives the Recording of one iteration with its numbers fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from coexec.backends.spec import Mode
from tests.backends.recording import Recorder, Recording, feed_differences, record

Step = Callable[[Recorder], Sequence[torch.Tensor]]


def two_iterations(build: Callable[[], Callable[[int], Step]], mode: Mode, threads: int = 1) -> Recording:
    """Record iteration 3 of the program, with every number that differs from iteration 4 fed."""
    recordings = []
    for last in (3, 4):
        torch.manual_seed(1)
        step = build()
        for iteration in range(last):
            step(iteration)(_Ignore())
        recordings.append(record(step(last), mode, threads, seed=7))
    return feed_differences(*recordings)


class _Ignore(Recorder):
    """Stands in where nothing is recorded."""

    def publish(self, tensor: torch.Tensor) -> None:
        pass


def mlp_adamw(mode: Mode = "commit", threads: int = 1) -> Recording:
    """MLP with LayerNorm, AdamW, a learning rate that changes every iteration; the loss is published."""

    def build() -> Callable[[int], Step]:
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))

        def iteration(number: int) -> Step:
            def step(recorder: Recorder) -> Sequence[torch.Tensor]:
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
                loss = F.cross_entropy(model(x), y)
                recorder.publish(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return [loss]

            return step

        return iteration

    return two_iterations(build, mode, threads)


class SmallConvNet(nn.Module):
    """Two convolutions with BatchNorm, a residual, pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.first(x)))
        h = F.relu(self.norm2(self.second(h)) + h)
        return self.head(F.max_pool2d(h, 2).mean((2, 3)))


def convnet_sgd(mode: Mode = "commit", threads: int = 1) -> Recording:
    """Small residual net with BatchNorm and SGD with momentum; loss and accuracy are published."""

    def build() -> Callable[[int], Step]:
        model = SmallConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
        x, y = torch.randn(8, 3, 12, 12), torch.randint(0, 10, (8,))

        def iteration(number: int) -> Step:
            def step(recorder: Recorder) -> Sequence[torch.Tensor]:
                optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                recorder.publish((logits.argmax(1) == y).sum())
                recorder.publish(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return [loss]

            return step

        return iteration

    return two_iterations(build, mode, threads)


def transformer_adamw(mode: Mode = "commit", threads: int = 1) -> Recording:
    """Two-layer transformer with dropout, gradient clipping and AdamW; the loss is published before backward."""

    def build() -> Callable[[int], Step]:
        embed = nn.Embedding(50, 32)
        layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)]
        model = nn.Sequential(embed, *layers, nn.Linear(32, 50))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = torch.randint(0, 50, (4, 12)), torch.randint(0, 50, (4, 12))

        def iteration(number: int) -> Step:
            def step(recorder: Recorder) -> Sequence[torch.Tensor]:
                optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number)
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                recorder.publish(loss)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return [loss, norm]

            return step

        return iteration

    return two_iterations(build, mode, threads)


def view_soup(mode: Mode = "functional", threads: int = 1) -> Recording:
    """In-place writes through views, aliasing inputs, an unused random draw, publishes before and after a write."""
    memory = torch.arange(24.0).reshape(4, 6)

    def step(recorder: Recorder) -> Sequence[torch.Tensor]:
        row, column, flat = memory[1], memory[:, 2], memory.view(24)
        with torch.no_grad():
            fresh = torch.zeros(3, 4)
            fresh[1:].add_(2.0)
            fresh.t()[0].mul_(3)
            torch.rand(5)  # drawn and dropped: the generator moves all the same
            noise = torch.empty(3, 4).normal_()
            recorder.publish(fresh)
            row.add_(column.sum())
            recorder.publish(memory)
            flat[3:7] = 1.5
            fresh.unsqueeze(0).div_(noise.abs() + 1)
            order = torch.randperm(4)
            picked = memory[order]
            memory.t().masked_fill_(memory.t() > 20, -1)
            swapped = torch.empty(4, 3).copy_(fresh.t())
            return [fresh, picked, noise, swapped, (memory > 0)]

    return record(step, mode, threads, seed=3)


PROGRAMS: dict[str, Callable[..., Recording]] = {
    "mlp_adamw": mlp_adamw,
    "convnet_sgd": convnet_sgd,
    "transformer_adamw": transformer_adamw,
    "view_soup": view_soup,
}
