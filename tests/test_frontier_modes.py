"""What a module does with modes, attributes and state: followed as plain PyTorch does, or refused by name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from . import frontier

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (8,), generator=torch.Generator().manual_seed(2))


class Distilled(nn.Module):
    """A student that learns from a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x))


def test_each_module_trains_in_the_mode_that_it_has() -> None:
    frontier.trains_equally(Distilled, (X,))
    model = Distilled()
    program = quintnet.compile(model, Mesh(dp=2), (X,))
    program.evaluate((X,))
    assert program.verify().ok
    assert model.training and not model.teacher.training and not model.teacher[1].training


def test_a_model_in_evaluation_mode_trains_without_dropout() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()

    frontier.trains_equally(build, (X, Y), F.cross_entropy, frontier.TWO_RANKS)
