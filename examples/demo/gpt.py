"""A small character-level GPT on the data set descriptions that scikit-learn ships, as a practitioner would train it.

The step has what real steps have: a learning-rate schedule, gradient clipping, a branch, `.item()` for the log and a
NumPy metric. `decorate` is the one line that coexec adds; `compile_model` and `compile_update` are where torch.compile
goes. Run alone: `python -m examples.demo.gpt`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # characters and the characters that follow them, both int64[batch, context]

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 192, 128, 4
STEPS, WARMUP_STEPS, PEAK_LR = 300, 30, 1e-3
Z_LOSS_RATE, Z_LOSS_WEIGHT = 0.25, 1e-4  # a pull on the softmax normaliser, on a random quarter of the steps
METRIC_EVERY = 10


class Attention(nn.Module):
    """Causal self-attention over x: float32[batch, time, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """One transformer layer, normalised before each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder-only transformer: int64[batch, time] to logits float32[batch, time, vocabulary]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class History:
    """What the step logs."""

    losses: list[float] = field(default_factory=list)  # nats per character
    accuracies: list[float] = field(default_factory=list)  # share of next characters guessed, every METRIC_EVERY steps


def load_text() -> str:
    """Returns the descriptions of scikit-learn's data sets, about 40,000 characters of English prose and tables."""
    folder = resources.files("sklearn.datasets.descr")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".rst")), key=lambda file: file.name)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def batches(tokens: Tensor, seed: int) -> Iterator[Batch]:
    """Yields random windows of the text, for ever; the generator is its own, so that nobody else's draws matter."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns AdamW's groups: matrices decay, gains and biases do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def warmup_then_cosine(step: int, steps: int) -> float:
    """Returns the factor on the peak learning rate at `step` of `steps`."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def same(value: Any) -> Any:
    """The decoration of plain eager: none."""
    return value


def build(
    seed: int = 0,
    *,
    decorate: Callable[[Any], Any] = same,
    compile_model: Callable[[Any], Any] = same,
    compile_update: Callable[[Any], Any] = same,
    lr: float | Tensor = PEAK_LR,
    steps: int = STEPS,
) -> tuple[Callable[[Batch], float], Iterator[Batch], nn.Module]:
    """Returns the training step, the batches, and the model.

    Args:
        seed: of the initial weights, the batches and the branch.
        decorate: wraps the step.
        compile_model: wraps the model for its forward call.
        compile_update: wraps `optimizer.step`.
        steps: length of the learning-rate schedule.
        lr: peak learning rate; torch.compile wants a tensor here, or it compiles the update again at each new rate.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    text = load_text()
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([alphabet[character] for character in text])

    model = GPT(len(alphabet))
    forward = compile_model(model)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warmup_then_cosine, steps=steps))
    update = compile_update(optimizer.step)
    history = History()

    @decorate
    def train_step(batch: Batch) -> float:
        inputs, targets = batch
        logits = forward(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        total = loss
        if random.random() < Z_LOSS_RATE:
            total = total + Z_LOSS_WEIGHT * logits.logsumexp(-1).square().mean()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()
        schedule.step()
        optimizer.zero_grad()

        history.losses.append(loss.item())
        if len(history.losses) % METRIC_EVERY == 0:
            guesses = logits.detach().argmax(-1).numpy()
            history.accuracies.append(float(np.mean(guesses == targets.numpy())))
        return history.losses[-1]

    return train_step, batches(tokens, seed), model


def main() -> None:
    """Trains eagerly and prints the loss."""
    step, data, _ = build()
    for index, batch in zip(range(STEPS), data, strict=False):
        loss = step(batch)
        if index % 20 == 19:
            print(f"step {index + 1:4d}  loss {loss:.3f}")


if __name__ == "__main__":
    main()
