"""ResNets of 18 and 50 layers as everybody writes them, for any size of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class Block(nn.Module):
    """Two convolutions of 3 x 3; or, in deep ones, one of 3 x 3 between two of 1 x 1."""

    def __init__(self, inputs: int, width: int, stride: int, *, deep: bool) -> None:
        super().__init__()
        outputs = 4 * width if deep else width
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)) if deep else (
            (inputs, width, 3, stride), (width, width, 3, 1))  # fmt: skip
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h if i == 0 else h.relu()))
        return (h + self.skip(x)).relu()  # type: ignore[no-any-return]


def resnet(layers: int = 18, width: int = 64, classes: int = 1000) -> nn.Sequential:
    """A ResNet with the stem of ImageNet."""
    deep = layers >= 50
    blocks: list[nn.Module] = []
    inputs = width
    for stage, count in enumerate(STAGES[layers]):
        size = width * 2**stage
        for index in range(count):
            blocks.append(Block(inputs, size, 2 if stage and not index else 1, deep=deep))
            inputs = 4 * size if deep else size
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def images(size: int, rows: int = 4, classes: int = 1000) -> tuple[Tensor, Tensor]:
    """A batch of noise."""
    return torch.randn(rows, 3, size, size), torch.randint(0, classes, (rows,))
