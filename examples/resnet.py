"""A small ResNet, written for one device: nothing here knows how it will be split."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, each with a BatchNorm, beside a shortcut (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """Square grey images to logits: ``[batch, size, size] -> [batch, classes]``."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inside = list[nn.Module](), width
        for stage in range(3):
            outside = width * 2**stage
            for i in range(depth):
                blocks.append(Block(inside, outside, 2 if stage and i == 0 else 1))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images[:, None]))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
