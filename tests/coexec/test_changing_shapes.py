"""Sizes that change from call to call: the step settles, and every result is eager's, bit by bit.

A size that was never seen is no new path: output metadata comes from meta kernels, integers that follow it are fed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.coexec.harness import Outcome, Program, check
from tests.coexec.programs import batch, labels, mlp, training

SETTLED = 30
"""Calls after which a program of this file falls back no more."""


def sizes(low: int, high: int, seed: int = 5) -> Callable[[int], int]:
    """The size of call `i`: any of `low` to `high`, the same in every run."""
    return lambda i: random.Random(seed * 100_000 + i).randint(low, high)


def settles(make: Callable[[], Program], n: int = 100) -> Outcome:
    """Runs `make` both ways; after `SETTLED` calls every call is co-executed as a whole."""
    out = check(make, n=n, max_fallbacks=SETTLED)
    late = [str(event) for event in out.compiled._runner.history.fallbacks if event.iteration > SETTLED]
    assert not late, "\n".join(late)
    assert out.stats is not None
    assert out.stats.co_executed >= n - SETTLED
    return out


def test_a_classifier_trains_on_batches_of_any_size() -> None:
    """Random sizes 1 to 64; the last batch of each epoch of 10 is what was left over."""
    rows = sizes(1, 64)

    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            n = 7 if i % 10 == 9 else rows(i)
            return batch(i, n), labels(i, n)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    settles(make, n=530)


def test_a_last_batch_that_is_smaller() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Program(
            training(model, optimizer),
            lambda i: (batch(i, 3 if i % 8 == 7 else 16), labels(i, 3 if i % 8 == 7 else 16)),
            lambda: model,
        )

    out = settles(make, n=40)
    assert out.fallbacks <= 1, out.explanation


class Attention(nn.Module):
    """One head over all keys so far, one token at a time; the cache grows by concatenation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, 11)
        self.embed = nn.Embedding(11, width)
        self.keys = torch.zeros(1, 0, width)
        self.values = torch.zeros(1, 0, width)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(token)).chunk(3, -1)
        self.keys = torch.cat([self.keys, k], 1)
        self.values = torch.cat([self.values, v], 1)
        weights = (q @ self.keys.transpose(1, 2) / 8**0.5).softmax(-1)
        return self.out(weights @ self.values)


def test_a_cache_that_grows_by_concatenation() -> None:
    def make() -> Program:
        model = Attention()
        token = torch.zeros(1, 1, dtype=torch.long)

        @torch.no_grad()
        def step() -> int:
            nonlocal token
            logits = model(token)
            token = logits[:, -1].argmax(-1, keepdim=True)
            return token.item()

        return Program(step, watch=lambda: (model.keys, model.values))

    settles(make, n=530)


def test_a_cache_that_is_written_at_a_position() -> None:
    def make() -> Program:
        torch.manual_seed(3)
        qkv, out, embed = nn.Linear(8, 24), nn.Linear(8, 11), nn.Embedding(11, 8)
        keys, values = torch.zeros(1, 600, 8), torch.zeros(1, 600, 8)
        token = torch.zeros(1, 1, dtype=torch.long)
        position = 0

        @torch.inference_mode()
        def step() -> int:
            nonlocal token, position
            q, k, v = qkv(embed(token)).chunk(3, -1)
            keys[:, position] = k[:, 0]
            values[:, position : position + 1] = v
            position += 1
            weights = (q @ keys[:, :position].transpose(1, 2) / 8**0.5).softmax(-1)
            token = out(weights @ values[:, :position])[:, -1].argmax(-1, keepdim=True)
            return token.item()

        return Program(step, watch=lambda: (keys, values))

    settles(make, n=560)


def test_a_prompt_of_any_length_then_tokens() -> None:
    """Prefill and decode are calls of one step; every prompt begins with an empty cache."""
    lengths = sizes(2, 20)

    def make() -> Program:
        model = Attention()

        @torch.no_grad()
        def step(tokens: torch.Tensor) -> Any:
            return model(tokens)[:, -1].argmax(-1)

        def args(i: int) -> tuple[torch.Tensor]:
            if i % 8 == 0:
                model.keys, model.values = torch.zeros(1, 0, 8), torch.zeros(1, 0, 8)
            return (labels(i, lengths(i) if i % 8 == 0 else 1, 11).unsqueeze(0),)

        return Program(step, args)

    settles(make)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_transformer_on_sequences_of_every_length(dropout: float) -> None:
    lengths = sizes(2, 24)

    def make() -> Program:
        embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        head = nn.Linear(16, 11)
        parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)

        def step(tokens: torch.Tensor) -> float:
            n = tokens.shape[1] - 1
            mask = torch.full((n, n), float("-inf")).triu(1)
            h = embed(tokens[:, :-1])
            optimizer.zero_grad()
            loss = F.cross_entropy(head(layer(h, mask)).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (labels(i, 3 * (lengths(i) + 1), 11).view(3, -1),), lambda: parameters)

    settles(make)


def test_positions_and_masks_made_from_the_length() -> None:
    lengths = sizes(1, 20)

    def make() -> Program:
        scale = torch.full((4,), 0.5, requires_grad=True)
        table = torch.randn(32, 4)

        def step(x: torch.Tensor) -> Any:
            n = x.shape[0]
            positions = torch.arange(n)
            causal = torch.tril(torch.ones(n, n))
            window = (positions[:, None] - positions[None]).abs() < 3
            h = (x + table[positions] + table[:n]) * scale
            scores = (h @ h.t()).masked_fill(causal == 0, -1e9).masked_fill(~window, -1e9)
            loss = (scores.softmax(-1) @ h)[: n // 2 + 1].sum() / n
            scale.grad = None
            loss.backward()
            return loss.item(), torch.linspace(0, 1, n), torch.eye(n).sum(), positions.flip(0)

        return Program(step, lambda i: (batch(i, lengths(i)),), lambda: scale)

    settles(make)


def test_images_of_any_resolution() -> None:
    side = sizes(6, 20)

    def make() -> Program:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            n = side(i)
            return batch(i, 5 * 3, n * (n + 1)).view(5, 3, n, n + 1), labels(i, 5)

        return Program(training(model, optimizer), args, lambda: model)

    settles(make)


def test_images_in_batches_of_any_size() -> None:
    rows = sizes(2, 40)

    def make() -> Program:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        args = lambda i: (batch(i, rows(i) * 3, 64).view(-1, 3, 8, 8), labels(i, rows(i)))  # noqa: E731
        return Program(training(model, optimizer), args, lambda: model)

    settles(make)


def test_an_image_that_is_resized_and_padded() -> None:
    side = sizes(5, 18)

    def step(x: torch.Tensor) -> Any:
        n = x.shape[-1]
        up = F.interpolate(x, size=(2 * n, n + 3), mode="bilinear", align_corners=False)
        padded = F.pad(x, (0, 20 - n, 1, 19 - n))
        patches = F.unfold(padded, 4, stride=4)
        return up.mean(), F.adaptive_max_pool2d(up, 4), patches, F.interpolate(x, scale_factor=2.0)

    settles(lambda: Program(step, lambda i: (batch(i, 2 * 3, side(i) ** 2).view(2, 3, side(i), -1),)))


def test_lists_of_tensors_of_changing_sizes() -> None:
    rows = sizes(1, 12)

    def step(x: torch.Tensor) -> Any:
        n = x.shape[0]
        first, second = x.split([n - n // 2, n // 2])
        chunks = [part.sum() for part in x.unbind(1)]
        together = torch.cat([second, x, first]).reshape(3, -1) if 2 * n % 3 == 0 else torch.cat([second, x, first])
        return torch.stack(chunks), together.view(-1)[::2].clone(), x.repeat(2, n).mean(), x.new_zeros(n, n + 1)

    settles(lambda: Program(step, lambda i: (batch(i, rows(i)),)))


def test_a_mask_of_valid_tokens() -> None:
    """Lengths are data: padding is cut to the longest sequence of the batch, which Python computes."""

    def make() -> Program:
        embed, head = nn.Embedding(11, 8), nn.Linear(8, 2)

        def step(tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
            longest = int(lengths.max())
            h = embed(tokens[:, :longest])
            valid = torch.arange(longest) < lengths[:, None]
            pooled = (h * valid[..., None]).sum(1) / lengths[:, None]
            loss = F.cross_entropy(head(pooled), lengths % 2)
            head.weight.grad = embed.weight.grad = None
            loss.backward()
            return loss.item(), pooled

        return Program(step, lambda i: (labels(i, 40, 11).view(4, 10), labels(i + 7, 4, 9) + 1), lambda: (embed, head))

    settles(make)
