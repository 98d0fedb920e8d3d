"""Music Transformer (Huang et al. 2018): relative attention by skewing, trained on synthetic melodies.

As in the usual implementations, attention writes what it met to itself while it runs (lengths, the last weights, for
plotting), and the training step computes its metrics with NumPy after every batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

PAD, FIRST_NOTE, NOTES = 0, 1, 96
VOCABULARY = FIRST_NOTE + NOTES
HEADS = 4


class RelativeGlobalAttention(nn.Module):
    """Self-attention with learned distances: x float32[batch, time, width], mask bool[time, time] (True: hidden)."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.longest, self.head_width = longest, width // HEADS
        self.wq, self.wk, self.wv = (nn.Linear(width, width) for _ in range(3))
        self.fc = nn.Linear(width, width)
        self.distances = nn.Parameter(torch.randn(longest, self.head_width) * 0.05)
        self.len_q = self.len_k = 0
        self.weights: Tensor | None = None

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.size(0), -1, HEADS, self.head_width).permute(0, 2, 1, 3)

    def _left_embedding(self) -> Tensor:
        """The distances that this length needs, float32[time, head_width]."""
        return self.distances[max(0, self.longest - self.len_q) :]

    def _skew(self, scores: Tensor) -> Tensor:
        """Moves row i left by time - 1 - i, so that a column is a position and no longer a distance."""
        B, H, T, _ = scores.shape
        padded = F.pad(scores, [1, 0]).reshape(B, H, T + 1, T)
        skewed = padded[:, :, 1:, :]
        if self.len_k > self.len_q:
            skewed = F.pad(skewed, [0, self.len_k - self.len_q])
        elif self.len_k < self.len_q:
            skewed = skewed[:, :, :, : self.len_k]
        return skewed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._heads(self.wq(x)), self._heads(self.wk(x)), self._heads(self.wv(x))
        self.len_k, self.len_q = k.size(2), q.size(2)
        relative = self._skew(torch.matmul(q, self._left_embedding().t()))
        scores = (torch.matmul(q, k.transpose(-1, -2)) + relative) / math.sqrt(self.head_width)
        weights = F.softmax(scores.masked_fill(mask, -1e9), dim=-1)
        self.weights = weights.detach()
        return self.fc(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(x.shape))


class Layer(nn.Module):
    """Attention and a feed-forward half, each added to its input and normalised after."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.attention, self.norm1 = RelativeGlobalAttention(width, longest), nn.LayerNorm(width, eps=1e-6)
        self.inner, self.outer = nn.Linear(width, width * 2), nn.Linear(width * 2, width)
        self.norm2, self.dropout = nn.LayerNorm(width, eps=1e-6), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        return self.norm2(x + self.dropout(self.outer(F.relu(self.inner(x)))))


class MusicTransformer(nn.Module):
    """Events int64[batch, time] to logits float32[batch, time, VOCABULARY]."""

    def __init__(self, width: int, layers: int, longest: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.register_buffer("positions", sinusoids(longest, width), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, longest) for _ in range(layers))
        self.fc = nn.Linear(width, VOCABULARY)

    def forward(self, events: Tensor) -> Tensor:
        time = events.size(1)
        mask = torch.triu(torch.ones(time, time, dtype=torch.bool), diagonal=1)
        x = self.dropout(self.embedding(events) * math.sqrt(self.width) + self.positions[:time])
        for layer in self.layers:
            x = layer(x, mask)
        return self.fc(x)


def sinusoids(longest: int, width: int) -> Tensor:
    """Returns position vectors, float32[longest, width] (Vaswani et al. 2017)."""
    angles = torch.arange(longest).unsqueeze(1) * torch.exp(-math.log(10_000.0) * torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


class CategoricalAccuracy:
    """Share of right guesses since the last reset, counted with NumPy."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def update(self, targets: np.ndarray, logits: np.ndarray) -> float:
        """Takes int64[batch, time] and float32[batch, time, VOCABULARY]; returns the share so far."""
        counted = targets != PAD
        self.right += int(np.sum((np.argmax(logits, axis=-1) == targets) & counted))
        self.seen += int(np.sum(counted))
        return self.right / max(1, self.seen)


def melodies(seed: int, batch: int, time: int) -> Iterator[Tensor]:
    """Yields arpeggios with a random key and rhythm, int64[batch, time + 1], for ever; a tenth is padding."""
    generator = np.random.default_rng(seed)
    chord = np.array([0, 4, 7, 12, 7, 4])
    while True:
        key = generator.integers(0, NOTES - 24, (batch, 1))
        stretch = generator.integers(1, 4, (batch, 1))
        beat = np.arange(time + 1)[None] // stretch
        notes = FIRST_NOTE + key + chord[beat % len(chord)] + 5 * ((beat // 12) % 2)
        notes[:, time - time // 10 :] = np.where(generator.random((batch, 1)) < 0.5, PAD, notes[:, time - time // 10 :])
        yield torch.from_numpy(notes)


def smoothed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels, padding left out."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1, reduction="none")
    weights = (targets != PAD).flatten().to(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, layers, batch, time = (16, 2, 2, 12) if tiny else (96, 4, 4, 96)
    model = MusicTransformer(width, layers, longest=time)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: width**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
    )
    accuracy = CategoricalAccuracy()
    history: list[tuple[float, float]] = []
    maps: dict[str, Tensor | None] = {}

    def step(events: Tensor) -> float:
        inputs, targets = events[:, :-1], events[:, 1:]
        optimizer.zero_grad()
        logits = model(inputs)
        loss = smoothed_loss(logits, targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        share = accuracy.update(targets.numpy(), logits.detach().numpy())
        history.append((float(loss.detach().numpy()), share))
        for number, layer in enumerate(model.layers):
            maps[f"layer {number}, {layer.attention.len_q} x {layer.attention.len_k}"] = layer.attention.weights
        return history[-1][0]

    extras = {"schedule": schedule, "history": history, "maps": maps}
    return Program(step, melodies(seed, batch, time), {"model": model}, {"optimizer": optimizer}, extras)
