"""GraphSAGE (Hamilton et al. 2017) with neighbour sampling, on the graph of which handwritten digits look alike.

Each batch is a few nodes, a random sample of their neighbours, and a sample of theirs: the sizes are new every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor, nn

from benchmarks.programs.program import Program, seed_everything

CLASSES, PIXELS, NEIGHBOURS = 10, 64, 12


class Hop(NamedTuple):
    """Edges of one layer: messages go from `source` to `target`, the first `targets` of the nodes."""

    source: Tensor  # int64[edges]
    target: Tensor  # int64[edges]
    targets: int


class Batch(NamedTuple):
    """A sampled piece of the graph, outermost hop first; the batch's own nodes come first among the nodes."""

    features: Tensor  # float32[nodes, PIXELS]
    hops: list[Hop]
    labels: Tensor  # int64[batch]


class SageLayer(nn.Module):
    """A node's own features and the mean of its neighbours': float32[nodes, inputs] to float32[targets, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, hop: Hop) -> Tensor:
        total = x.new_zeros(hop.targets, x.size(1)).index_add(0, hop.target, x[hop.source])
        count = x.new_zeros(hop.targets).index_add(0, hop.target, torch.ones(len(hop.target)))
        return self.own(x[: hop.targets]) + self.others(total / count.clamp(min=1.0)[:, None])


class GraphSage(nn.Module):
    """A sampled piece to logits float32[batch, CLASSES]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SageLayer(PIXELS, width), SageLayer(width, width), SageLayer(width, CLASSES)])

    def forward(self, features: Tensor, hops: list[Hop]) -> Tensor:
        x = features
        for number, (layer, hop) in enumerate(zip(self.layers, hops, strict=True)):
            x = layer(x, hop)
            if number + 1 < len(self.layers):
                x = F.dropout(F.normalize(F.relu(x), dim=-1), 0.2, self.training)
        return x


class NeighbourSampler:
    """Draws up to `fanout` neighbours of each node, hop by hop, with NumPy."""

    def __init__(self, rows: np.ndarray, columns: np.ndarray, fanouts: tuple[int, ...], seed: int) -> None:
        self.starts, self.columns, self.fanouts = rows, columns, fanouts
        self.generator = np.random.default_rng(seed)

    def _neighbours(self, node: int, fanout: int) -> np.ndarray:
        found = self.columns[self.starts[node] : self.starts[node + 1]]
        count = min(fanout, len(found))
        return self.generator.choice(found, int(self.generator.integers(1, count + 1)), replace=False)

    def sample(self, seeds: np.ndarray) -> tuple[np.ndarray, list[Hop]]:
        """Returns the nodes of the piece and its hops, outermost first."""
        nodes, hops = list(seeds), []
        for fanout in self.fanouts:
            place = {node: number for number, node in enumerate(nodes)}
            source, target = [], []
            targets = len(nodes)
            for number in range(targets):
                for neighbour in self._neighbours(nodes[number], fanout):
                    if neighbour not in place:
                        place[neighbour] = len(nodes)
                        nodes.append(neighbour)
                    source.append(place[neighbour])
                    target.append(number)
            hops.append(Hop(torch.tensor(source), torch.tensor(target), targets))
        return np.array(nodes), hops[::-1]


def pieces(seed: int, batch: int, fanouts: tuple[int, ...]) -> Iterator[Batch]:
    """Yields sampled pieces of the digits' graph, for ever."""
    data = load_digits()
    graph = kneighbors_graph(data.data, NEIGHBOURS).tocsr()
    features, labels = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    sampler = NeighbourSampler(graph.indptr, graph.indices, fanouts, seed)
    while True:
        seeds = sampler.generator.choice(len(labels), batch, replace=False)
        nodes, hops = sampler.sample(seeds)
        yield Batch(features[nodes], hops, labels[seeds])


def make(seed: int = 0, tiny: bool = False) -> Program:
    """Builds the program."""
    seed_everything(seed)
    width, batch, fanouts = (8, 4, (2, 2, 2)) if tiny else (256, 64, (8, 6, 4))
    model = GraphSage(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=5e-4)
    history: list[tuple[float, float]] = []

    def step(piece: Batch) -> float:
        optimizer.zero_grad()
        logits = model(piece.features, piece.hops)
        loss = F.cross_entropy(logits, piece.labels)
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(1) == piece.labels).float().mean()
        history.append((loss.item(), accuracy.item()))
        return history[-1][0]

    return Program(step, pieces(seed, batch, fanouts), {"model": model}, {"optimizer": optimizer}, {"history": history})
