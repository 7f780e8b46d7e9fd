"""Train a ResNet on handwritten digits, split 2 x 2 over 4 ranks, beside the unsplit model.

    python examples/train_resnet.py               4 processes on this machine's CPU cores
    python examples/train_resnet.py --local       all ranks inside this process
    torchrun --nproc-per-node 4 examples/train_resnet.py     one GPU per rank
    python examples/train_resnet.py --mnist DIR   MNIST, from its IDX files

Its BatchNorms have statistics of the whole batch, over all data ranks, as the unsplit model's; so do the running
averages with which it is validated. It computes in float64: in float32, plain PyTorch's own losses are 1% from those
of float64 after ten steps, by rounding alone. The exit code is 1 if the split model ends below 95% validation accuracy
or its losses differ from the unsplit model's by more than rounding explains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from resnet import ResNet
from torch import Tensor, nn
from train_vit import Recipe, main


def resnet(size: int) -> nn.Module:
    """For images of any ``size``."""
    return ResNet()


def sgd(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """As He et al. (2016) train it."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)


RESNET = Recipe(resnet, sgd, mesh="dp=2,tp=2", microbatches=1, epochs=8, lr=0.05, dump=Path("out/resnet"), float64=True)

if __name__ == "__main__":
    sys.exit(main(RESNET, __doc__))
