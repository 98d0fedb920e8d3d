"""A mixture of experts (Shazeer et al. 2017; Switch, Fedus et al. 2022), routed by Python: counts go through a list.

Each token goes to its best two experts. Tokens are sorted by expert, the counts are read with `.tolist()`, and a Python
loop runs each expert that has tokens on its slice, so that nearly every size changes with every batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

VOCABULARY, HEADS, EXPERTS, CHOSEN = 256, 4, 8, 2
BALANCE = 0.01


class Expert(nn.Module):
    """A gated feed-forward net over float32[tokens, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """x: float32[batch, time, width] to the same shape, and the balance loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = F.softmax(self.router(tokens), dim=-1)
        weights, choices = shares.topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = choices.flatten().argsort(stable=True)
        counts = choices.flatten().bincount(minlength=EXPERTS)
        outputs = []
        for expert, group in zip(self.experts, tokens[order // CHOSEN].split(counts.tolist()), strict=True):
            if len(group):
                outputs.append(expert(group))
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens).index_add(0, order // CHOSEN, weighted)
        balance = EXPERTS * (shares.mean(0) * counts / counts.sum()).sum()
        return mixed.view_as(x), balance


class Block(nn.Module):
    """Causal attention and a mixture of experts, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.moe = nn.RMSNorm(width), MixtureOfExperts(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, C))
        mixed, balance = self.moe(self.norm2(x))
        return x + mixed, balance


class MoELanguageModel(nn.Module):
    """Tokens int64[batch, time] to logits float32[batch, time, VOCABULARY] and the sum of the balance losses."""

    def __init__(self, width: int, layers: int, time: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(time, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).sum()


def sequences(seed: int, batch: int, time: int) -> Iterator[Tensor]:
    """Yields int64[batch, time + 1] in which a token follows from the two before it, with noise, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (batch, time + 1), generator=generator)
        noisy = torch.rand(batch, time + 1, generator=generator) < 0.1
        for place in range(2, time + 1):
            follows = (5 * tokens[:, place - 1] + tokens[:, place - 2] + 1) % VOCABULARY
            tokens[:, place] = torch.where(noisy[:, place], tokens[:, place], follows)
        yield tokens


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, layers, batch, time = (16, 1, 2, 8) if tiny else (96, 3, 4, 64)
    model = MoELanguageModel(width, layers, time)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses: list[float] = []

    def step(tokens: Tensor) -> float:
        logits, balance = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        return losses[-1]

    return Program(step, sequences(seed, batch, time), {"model": model}, {"optimizer": optimizer}, {"losses": losses})
