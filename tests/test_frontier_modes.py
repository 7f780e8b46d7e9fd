"""What a module does with modes, attributes and state: followed as plain PyTorch does, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

LAYOUTS = (Mesh(dp=1), Mesh(dp=2), Mesh(tp=2), Mesh(pp=2), Mesh(dp=2, tp=2))


class Distilled(nn.Module):
    """A student that learns from a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x))


def _rows() -> tuple[Tensor]:
    return (torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


@pytest.mark.parametrize("mesh", LAYOUTS, ids=repr)
def test_each_module_trains_in_the_mode_that_it_has(mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = Distilled().double()
    plain = copy.deepcopy(model)
    program = quintnet.compile(model, mesh, _rows())
    _trains_alike(program, plain, _rows(), _rows(), _rows())
    assert program.verify().ok
    assert model.training and not model.teacher.training and not model.teacher[1].training


def test_a_model_in_evaluation_mode_trains_without_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double().eval()
    plain = copy.deepcopy(model)
    batch = (*_rows(), torch.randint(4, (8,)))
    program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    _trains_alike(program, lambda x, y: F.cross_entropy(plain(x), y), batch, batch, parameters=plain)


def _trains_alike(program: Any, plain: Any, *batches: Any, parameters: nn.Module | None = None) -> None:
    """SGD steps of both: losses and parameters are equal."""
    model = plain if parameters is None else parameters
    ours = torch.optim.SGD(program.parameters(), lr=0.1)
    theirs = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for batch in batches:
        loss = program.step(batch)
        expected = plain(*batch)
        expected.backward()
        assert abs(float(loss) - float(expected)) < 1e-9
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, p in program.named_parameters():
        torch.testing.assert_close(p.detach().full_tensor(), model.get_parameter(name), rtol=1e-9, atol=1e-9)
