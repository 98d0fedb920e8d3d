"""GPT-2 (Radford et al. 2019) from scratch on English text: every batch has another length, as texts do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

HEADS, LONGEST = 4, 128


class Attention(nn.Module):
    """Causal self-attention over x: float32[batch, time, width], written out with a mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.mask[:T, :T], float("-inf"))
        y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    """One layer, normalised before each half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc, self.c_proj, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """Tokens int64[batch, time] to logits float32[batch, time, vocabulary]; the head shares the embedding's weights."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(LONGEST, width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialise)
        self.lm_head.weight = self.wte.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1))
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def characters() -> Tensor:
    """Returns the descriptions of scikit-learn's data sets, one number per character: int64[characters]."""
    files = sorted(resources.files("sklearn.datasets.descr").iterdir(), key=lambda file: file.name)
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.name.endswith(".rst"))
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text])


def windows(text: Tensor, seed: int, batch: int, shortest: int, longest: int) -> Iterator[Tensor]:
    """Yields int64[batch, time + 1], for ever; time is drawn anew for each batch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        time = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        starts = torch.randint(len(text) - time, (batch,), generator=generator)
        yield torch.stack([text[start : start + time + 1] for start in starts.tolist()])


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, layers, batch, shortest, longest = (16, 2, 2, 6, 12) if tiny else (128, 4, 4, 48, 127)
    text = characters()
    model = GPT2(int(text.max()) + 1, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    perplexities: list[float] = []

    def step(tokens: Tensor) -> float:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        perplexities.append(math.exp(min(20.0, loss.item())))
        return perplexities[-1]

    batches = windows(text, seed, batch, shortest, longest)
    return Program(step, batches, {"model": model}, {"optimizer": optimizer}, {"perplexities": perplexities})
