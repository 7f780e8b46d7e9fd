"""Models of plain PyTorch: a U-Net, and message passing as PyTorch Geometric computes it, by index_add and scatter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..frontier import Case
from .pieces import CLASSES, ROWS, segmenter

NODES, EDGES, FEATURES, WIDTH = 16, 40, 6, 8


class UNet(nn.Module):
    """Ronneberger et al. (2015), two levels deep, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._two(3, 8), self._two(8, 16)])
        self.middle, self.drop = self._two(16, 32), nn.Dropout2d(0.2)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([self._two(32, 16), self._two(16, 8)])
        self.last = nn.Conv2d(8, CLASSES, 1)

    @staticmethod
    def _two(came: int, goes: int) -> nn.Module:
        one = lambda i: (nn.Conv2d(i, goes, 3, padding=1, bias=False), nn.BatchNorm2d(goes), nn.ReLU(inplace=True))  # noqa: E731
        return nn.Sequential(*one(came), *one(goes))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for part in self.down:
            kept.append(part(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.drop(self.middle(x))
        for grow, part in zip(self.grow, self.up, strict=True):
            x = part(torch.cat([kept.pop(), grow(x)], 1))
        return self.last(x)


class GCN(nn.Module):
    """Kipf and Welling (2017): neighbours and the node itself, each divided by the roots of both degrees."""

    def __init__(self, came: int, goes: int) -> None:
        super().__init__()
        self.lin, self.bias = nn.Linear(came, goes, bias=False), nn.Parameter(0.1 * torch.randn(goes))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(x.shape[0], device=x.device).expand(2, -1)
        source, target = torch.cat([edges, loops], 1)
        degree = x.new_zeros(x.shape[0]).scatter_add_(0, target, x.new_ones(target.shape[0]))
        weight = degree.rsqrt()[source] * degree.rsqrt()[target]
        messages = self.lin(x)[source] * weight[:, None]
        return messages.new_zeros(x.shape[0], messages.shape[1]).index_add_(0, target, messages) + self.bias


class GAT(nn.Module):
    """Velickovic et al. (2018), two heads: a softmax over the edges that end in a node."""

    def __init__(self, came: int, goes: int, heads: int = 2) -> None:
        super().__init__()
        self.lin, self.heads = nn.Linear(came, heads * goes, bias=False), heads
        self.source, self.target = (nn.Parameter(torch.randn(heads, goes)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.lin(x).unflatten(1, (self.heads, -1))
        score = F.leaky_relu((h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target], 0.2)
        where = target[:, None].expand_as(score)
        zeros = score.new_zeros(len(x), self.heads)
        highest = zeros.scatter_reduce(0, where, score.detach(), "amax", include_self=False)
        weight = (score - highest[target]).exp()
        total = zeros.scatter_add(0, where, weight)
        weight = weight / (total[target] + 1e-16)
        out = h.new_zeros(h.shape).index_add(0, target, h[source] * weight[:, :, None])
        return out.mean(1)


class SAGE(nn.Module):
    """Hamilton et al. (2017): the mean of the neighbours beside the node itself, to length one."""

    def __init__(self, came: int, goes: int) -> None:
        super().__init__()
        self.near, self.own = nn.Linear(came, goes), nn.Linear(came, goes, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        where = target[:, None].expand(-1, x.shape[1])
        mean = torch.zeros_like(x).scatter_reduce(0, where, x[source], "mean", include_self=False)
        return F.normalize(self.near(mean) + self.own(x), dim=-1)


class GIN(nn.Module):
    """Xu et al. (2019): a sum over neighbours, and an MLP with a batch norm."""

    def __init__(self, came: int, goes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(came, goes), nn.BatchNorm1d(goes), nn.ReLU(), nn.Linear(goes, goes))
        self.eps = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        return self.mlp((1 + self.eps) * x + torch.zeros_like(x).index_add(0, target, x[source]))


class OfNodes(nn.Module):
    """Says the class of each node of one graph (a citation network): rows of the batch are its nodes."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(0)
        self.register_buffer("edges", torch.randint(NODES, (2, EDGES), generator=dice))
        self.a, self.drop, self.b = layer(FEATURES, WIDTH), nn.Dropout(0.3), layer(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.a(x, self.edges).relu()), self.edges)


class OfGraphs(nn.Module):
    """Says the class of each of a batch of graphs (molecules), which are one graph of many parts meanwhile."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.last = layer(FEATURES, WIDTH), layer(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        rows, nodes = x.shape[:2]
        first = nodes * torch.arange(rows, device=x.device)
        whole = (edges + first[:, None, None]).transpose(0, 1).flatten(1)
        h = self.b(self.a(x.flatten(0, 1), whole).relu(), whole)
        of = torch.arange(rows, device=x.device).repeat_interleave(nodes)
        return self.last(h.new_zeros(rows, h.shape[1]).index_add_(0, of, h) / nodes)


def _nodes(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(NODES, FEATURES, generator=dice), torch.randint(CLASSES, (NODES,), generator=dice)


def _graphs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    x, edges = torch.randn(ROWS, 5, FEATURES, generator=dice), torch.randint(5, (ROWS, 2, 12), generator=dice)
    return x, edges, torch.randint(CLASSES, (ROWS,), generator=dice)


def _of_nodes(layer: type[nn.Module]) -> Case:
    return Case(lambda: OfNodes(layer), _nodes, F.cross_entropy)


def _of_graphs(layer: type[nn.Module]) -> Case:
    return Case(lambda: OfGraphs(layer), _graphs, F.cross_entropy)


CASES: Mapping[str, Case] = {
    "U-Net": segmenter(UNet, 16),
    **{f"{layer.__name__}, nodes of a graph": _of_nodes(layer) for layer in (GCN, GAT, SAGE, GIN)},
    **{f"{layer.__name__}, a batch of graphs": _of_graphs(layer) for layer in (GCN, GAT, SAGE, GIN)},
}
