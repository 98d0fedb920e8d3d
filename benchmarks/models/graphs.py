"""Graph nets over edge lists (gather and scatter) and over a dense adjacency. A batch is one disjoint graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.build import Built, Inputs, Make, dense

NODES, EDGES, FEATURES, CLASSES = 200, 1200, 64, 7


def edge_list(batch: int) -> tuple[Tensor, ...]:
    """Features (nodes, FEATURES) and edges (2, edges), self-loops among them, of `batch` graphs side by side."""
    first = torch.arange(batch).repeat_interleave(EDGES) * NODES
    edges = torch.randint(0, NODES, (2, batch * EDGES)) + first
    loops = torch.arange(batch * NODES).expand(2, -1)
    return torch.randn(batch * NODES, FEATURES), torch.cat([edges, loops], 1)


def adjacency(batch: int) -> tuple[Tensor, ...]:
    """Features (batch, nodes, FEATURES) and a symmetric 0/1 adjacency with self-loops."""
    sparse = (torch.rand(batch, NODES, NODES) < EDGES / NODES**2).float()
    return torch.randn(batch, NODES, FEATURES), torch.clamp(sparse + sparse.mT + torch.eye(NODES), max=1.0)


class GraphConvolution(nn.Module):
    """Two layers normalized by the roots of the degrees (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degrees = x.new_zeros(x.shape[0]).index_add(0, target, x.new_ones(target.shape[0]))
        weights = (degrees[source] * degrees[target]).rsqrt()[:, None]
        x = self.spread(self.first(x), source, target, weights).relu()
        return self.spread(self.second(x), source, target, weights).log_softmax(1)

    @staticmethod
    def spread(x: Tensor, source: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, target, x[source] * weights)


class Attention(nn.Module):
    """One layer of edge-wise attention with a softmax per target (Velickovic et al. 2018)."""

    def __init__(self, inputs: int, heads: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, heads * width, bias=False)
        self.of_source = nn.Parameter(0.1 * torch.randn(heads, width))
        self.of_target = nn.Parameter(0.1 * torch.randn(heads, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        y = self.project(x).unflatten(1, self.of_source.shape)
        scores = F.leaky_relu((y * self.of_source).sum(-1)[source] + (y * self.of_target).sum(-1)[target], 0.2)
        index = target[:, None].expand_as(scores)
        highest = scores.new_full((x.shape[0], scores.shape[1]), -1e9).scatter_reduce(0, index, scores, "amax")
        weights = (scores - highest[target]).exp()
        total = torch.zeros_like(highest).index_add(0, target, weights)
        messages = y[source] * (weights / total[target])[..., None]
        return torch.zeros_like(y).index_add(0, target, messages).flatten(1)


class AttentionNet(nn.Module):
    """Two attention layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(FEATURES, 4, 16), Attention(64, 1, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edges)), edges).log_softmax(1)


class Sage(nn.Module):
    """Mean of the neighbours beside the node itself (Hamilton et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((FEATURES, 64), (64, CLASSES))
        self.own = nn.ModuleList([nn.Linear(*pair) for pair in widths])
        self.others = nn.ModuleList([nn.Linear(*pair, bias=False) for pair in widths])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        index = target[:, None]
        for number, (own, others) in enumerate(zip(self.own, self.others, strict=True)):
            picked = x[source]
            mean = torch.zeros_like(x).scatter_reduce(0, index.expand_as(picked), picked, "mean", include_self=False)
            x = own(x) + others(mean)
            x = F.normalize(x.relu(), dim=1) if number == 0 else x
        return x.log_softmax(1)


class Isomorphism(nn.Module):
    """Sums of neighbours through perceptrons (Xu et al. 2019), one label per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([dense(FEATURES, 64, 64), dense(64, 64, 64), dense(64, 64, 64)])
        self.scale, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(3 * 64, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sums = []
        for number, layer in enumerate(self.layers):
            x = layer((1 + self.scale[number]) * x + torch.zeros_like(x).index_add(0, target, x[source])).relu()
            sums.append(x.unflatten(0, (-1, NODES)).mean(1))
        return self.head(torch.cat(sums, 1))


class DenseConvolution(nn.Module):
    """Graph convolution as matrix products, with Chebyshev-like powers and a pooled output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 64), nn.Linear(64, 64), nn.Linear(64, 32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        scale = adjacent.sum(-1).rsqrt()
        smooth = scale[:, :, None] * adjacent * scale[:, None]
        for layer in self.layers:
            x = (smooth @ layer(x)).relu()
        return self.head(x.mean(1))


def on(module: nn.Module, inputs: Inputs) -> Built:
    """The pair."""
    return module, inputs


def gcn() -> Built:
    """Scatter by index_add."""
    return on(GraphConvolution(), edge_list)


def gat() -> Built:
    """Softmax over edges."""
    return on(AttentionNet(), edge_list)


def graphsage() -> Built:
    """Scatter by mean."""
    return on(Sage(), edge_list)


def gin() -> Built:
    """A label per graph."""
    return on(Isomorphism(), edge_list)


def gcn_dense() -> Built:
    """Matrix products."""
    return on(DenseConvolution(), adjacency)


MODELS: dict[str, Make] = {make.__name__: make for make in (gcn, gat, graphsage, gin, gcn_dense)}
