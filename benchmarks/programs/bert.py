"""BERT's encoder (Devlin et al. 2019), a few narrow layers of it: what the two BERT programs fine-tune."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an encoder and its batches."""

    vocabulary: int = 1000
    width: int = 128
    heads: int = 4
    layers: int = 4
    length: int = 96  # tokens of a padded sequence
    batch: int = 8
    dropout: float = 0.1


TINY = Sizes(vocabulary=50, width=16, heads=2, layers=2, length=16, batch=2)


class Embeddings(nn.Module):
    """Sum of word, position and segment vectors, normalised: int64[batch, length] twice to float32[..., width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.width, padding_idx=0)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.segments = nn.Embedding(2, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1)).unsqueeze(0).expand_as(tokens)
        x = self.words(tokens) + self.positions(positions) + self.segments(segments)
        return self.dropout(self.norm(x))


class SelfAttention(nn.Module):
    """Attention over x: float32[batch, length, width]; `bias` is added to the scores, float32[batch, 1, 1, length]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def _split(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        return x.view(B, T, self.heads, C // self.heads).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        weights = self.dropout(torch.softmax(scores + bias, dim=-1))
        return self.out(torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().view(x.shape))


class Layer(nn.Module):
    """Attention and a feed-forward half, each added to its input and normalised after."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.norm1 = SelfAttention(sizes), nn.LayerNorm(sizes.width, eps=1e-12)
        self.inner, self.outer = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)
        self.norm2, self.dropout = nn.LayerNorm(sizes.width, eps=1e-12), nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, bias)))
        return self.norm2(x + self.dropout(self.outer(F.gelu(self.inner(x)))))


class Encoder(nn.Module):
    """Tokens, segments and mask (1: a token, 0: padding), int64[batch, length], to float32[batch, length, width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.apply(initialise)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        bias = (1.0 - mask[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        x = self.embeddings(tokens, segments)
        for layer in self.layers:
            x = layer(x, bias)
        return x


def initialise(module: nn.Module) -> None:
    """Weights from a narrow normal distribution, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def decay_groups(model: nn.Module, decay: float = 0.01) -> list[dict[str, object]]:
    """Returns AdamW's groups: biases and norms do not decay."""
    kept = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    return [{"params": rest, "weight_decay": decay}, {"params": kept, "weight_decay": 0.0}]


def fine_tuning(model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Returns the optimizer and the schedule that BERT is fine-tuned with."""
    optimizer = torch.optim.AdamW(decay_groups(model), lr=3e-4)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_linear)


def warmup_then_linear(step: int, warmup: int = 100, steps: int = 10_000) -> float:
    """Returns the factor on the peak learning rate: up to 1 over `warmup` steps, then down to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / (steps - warmup))
