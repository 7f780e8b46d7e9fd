"""Networks of other kinds at their usual sizes, in plain torch: a U-Net, a detector, a graph network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(32, width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, width, high, wide = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.inner(y).view(rows, high * wide, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, high * wide, width)
        return x + self.outer(y).transpose(1, 2).reshape(rows, width, high, wide)


class UNet(nn.Module):
    """Stable Diffusion's widths: ``[rows, 4, 64, 64]`` to the same, attention in the lower levels."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280, 1280), blocks: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        self.down, self.up, self.halves = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        width = widths[0]
        for level, outputs in enumerate(widths):
            self.down.append(self._level(width, outputs, blocks, level < len(widths) - 1))
            self.up.insert(0, self._level(2 * outputs, width, blocks, level < len(widths) - 1))
            self.halves.append(nn.Conv2d(outputs, outputs, 3, 2 if level < len(widths) - 1 else 1, 1))
            width = outputs
        self.middle = nn.Sequential(_Residual(width, width), _Attention(width), _Residual(width, width))

    @staticmethod
    def _level(inputs: int, outputs: int, blocks: int, attends: bool) -> nn.Sequential:
        layers: list[nn.Module] = []
        for block in range(blocks):
            layers.append(_Residual(outputs if block else inputs, outputs))
            layers += [_Attention(outputs)] if attends else []
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for level, half in zip(self.down, self.halves, strict=True):
            x = level(x)
            kept.append(x)
            x = half(x)
        x = self.middle(x)
        for level in self.up:
            other = kept.pop()
            x = level(torch.cat([F.interpolate(x, size=other.shape[2:]), other], 1))
        return self.last(x)


class _Darknet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.norm2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        return x + F.leaky_relu(self.norm2(self.conv2(y)), 0.1)


class Detector(nn.Module):
    """Darknet-53, with LeakyReLU and BatchNorm: ``[rows, 3, high, wide]`` to ``[rows, classes]``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.1)]
        for width, blocks in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
            layers += [nn.Conv2d(width // 2, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.1)]
            layers += [_Darknet(width) for _ in range(blocks)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(1024, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class _Message(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)
        self.node = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.LeakyReLU(0.2), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        source, target = (end.unsqueeze(2).expand(-1, -1, x.shape[2]) for end in ends.unbind(1))
        sent = F.leaky_relu(self.edge(torch.cat([x.gather(1, source), x.gather(1, target)], 2)), 0.2)
        heard = torch.zeros_like(x).scatter_add(1, target, sent)
        return x + self.node(torch.cat([self.norm(x), heard], 2))


class GraphNet(nn.Module):
    """Messages along edges: nodes ``[rows, nodes, features]`` with ends of edges ``[rows, 2, edges]`` to ``[rows,
    classes]``."""

    def __init__(self, features: int, classes: int, width: int = 512, layers: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, classes)
        self.layers = nn.ModuleList(_Message(width) for _ in range(layers))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, ends = inputs
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, ends)
        return self.last(x.mean(1))
