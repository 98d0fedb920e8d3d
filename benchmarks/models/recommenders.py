"""Recommendation: sparse features through embeddings, dense ones through perceptrons, and their interactions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Inputs, Make, dense, tokens

FIELDS, ROWS, WIDTH = 16, 1000, 16


def dense_and_sparse(dense_features: int, bag: int | None = None) -> Inputs:
    """Dense features, and per field one row number (or a bag of them)."""
    shape = (FIELDS,) if bag is None else (FIELDS, bag)
    return lambda batch: (torch.randn(batch, dense_features), torch.randint(0, ROWS, (batch, *shape)))


class DLRM(nn.Module):
    """Bags of rows, a bottom and a top perceptron, dot products between (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(FIELDS)])
        pairs = torch.tril_indices(FIELDS + 1, FIELDS + 1, -1)
        self.left, self.right = nn.Buffer(pairs[0]), nn.Buffer(pairs[1])
        self.bottom = dense(13, 256, 64, WIDTH, last=nn.ReLU)
        self.top = dense(WIDTH + pairs.shape[1], 256, 64, 1, last=nn.Sigmoid)

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        bottom = self.bottom(features)
        vectors = torch.stack([bottom, *(bag(rows[:, field]) for field, bag in enumerate(self.bags))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.left, self.right]
        return self.top(torch.cat([bottom, products], 1))


class WideAndDeep(nn.Module):
    """A linear model over sparse features beside a perceptron over their embeddings (Cheng et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Buffer(torch.arange(FIELDS) * ROWS)
        self.wide, self.embedding = nn.Embedding(FIELDS * ROWS, 1), nn.Embedding(FIELDS * ROWS, WIDTH)
        self.deep = dense(FIELDS * WIDTH + 13, 256, 128, 1)

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        rows = rows + self.offsets
        deep = self.deep(torch.cat([self.embedding(rows).flatten(1), features], 1))
        return torch.sigmoid(self.wide(rows).sum(1) + deep)


class DeepFM(nn.Module):
    """A factorization machine and a perceptron over the same embeddings (Guo et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Buffer(torch.arange(FIELDS) * ROWS)
        self.first, self.second = nn.Embedding(FIELDS * ROWS, 1), nn.Embedding(FIELDS * ROWS, WIDTH)
        self.deep, self.features = dense(FIELDS * WIDTH, 256, 128, 1), nn.Linear(13, 1)

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        rows = rows + self.offsets
        vectors = self.second(rows)
        crossed = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        linear = self.first(rows).sum(1) + self.features(features)
        return torch.sigmoid(linear + crossed + self.deep(vectors.flatten(1)))


class CrossNetwork(nn.Module):
    """Explicit crosses of the input with itself, and a perceptron (DCN v2, Wang et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Buffer(torch.arange(FIELDS) * ROWS)
        self.embedding = nn.Embedding(FIELDS * ROWS, WIDTH)
        width = FIELDS * WIDTH + 13
        self.crosses = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.deep, self.head = dense(width, 256, 64, last=nn.ReLU), nn.Linear(width + 64, 1)

    def forward(self, features: Tensor, rows: Tensor) -> Tensor:
        base = torch.cat([self.embedding(rows + self.offsets).flatten(1), features], 1)
        crossed = base
        for cross in self.crosses:
            crossed = base * cross(crossed) + crossed
        return torch.sigmoid(self.head(torch.cat([crossed, self.deep(base)], 1)))


class NeuralCollaborative(nn.Module):
    """Matrix factorization and a perceptron over user and item (He et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(5000, 2 * 64), nn.Embedding(5000, 2 * 64)
        self.deep, self.head = dense(128, 128, 64, 32, last=nn.ReLU), nn.Linear(96, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        (user_flat, user_deep), (item_flat, item_deep) = self.users(user).chunk(2, 1), self.items(item).chunk(2, 1)
        deep = self.deep(torch.cat([user_deep, item_deep], 1))
        return torch.sigmoid(self.head(torch.cat([user_flat * item_flat, deep], 1)))


class TwoTowers(nn.Module):
    """A user's and an item's vector; similarities of all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(5000, 64, mode="mean")
        self.user, self.item = dense(64, 256, 64), dense(64, 256, 64)

    def forward(self, clicked: Tensor, described: Tensor) -> Tensor:
        user = F.normalize(self.user(self.embedding(clicked)), dim=1)
        return user @ F.normalize(self.item(self.embedding(described)), dim=1).T


class SequentialAttention(nn.Module):
    """The next item from the past ones with causal self-attention (SASRec, Kang and McAuley 2018)."""

    def __init__(self, width: int = 64, length: int = 50) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(ROWS, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        self.projections = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.feed = nn.ModuleList([dense(width, width, width) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids) + self.positions
        for layer, (projection, feed) in enumerate(zip(self.projections, self.feed, strict=True)):
            q, k, v = projection(self.norms[2 * layer](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).flatten(2)
            x = x + feed(self.norms[2 * layer + 1](x))
        return self.norms[4](x[:, -1]) @ self.items.weight.T


def dlrm() -> Built:
    """16 bags of 4 rows."""
    return DLRM(), dense_and_sparse(13, 4)


def wide_and_deep() -> Built:
    """16 fields."""
    return WideAndDeep(), dense_and_sparse(13)


def deepfm() -> Built:
    """16 fields."""
    return DeepFM(), dense_and_sparse(13)


def dcn() -> Built:
    """Three crosses."""
    return CrossNetwork(), dense_and_sparse(13)


def ncf() -> Built:
    """100 pairs per sample."""
    return NeuralCollaborative(), lambda batch: (
        torch.randint(0, 5000, (100 * batch,)),
        torch.randint(0, 5000, (100 * batch,)),
    )


def two_towers() -> Built:
    """32 users and items per sample."""
    return TwoTowers(), lambda batch: tokens(5000, 20)(32 * batch) + tokens(5000, 8)(32 * batch)


def sasrec() -> Built:
    """50 past items."""
    return SequentialAttention(), tokens(ROWS, 50)


MODELS: dict[str, Make] = {make.__name__: make for make in (dlrm, wide_and_deep, deepfm, dcn, ncf, two_towers, sasrec)}
