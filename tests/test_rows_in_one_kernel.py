"""Operators that compute each row on its own, in one call for all rows, over microbatches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


class Products(nn.Module):
    """A square matrix of each row, and what is made of it."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.made = nn.Linear(6, 6), nn.Linear(6, 6), made

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.first(x)))
        return self.made(h @ h.transpose(1, 2)).sin().mean()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal by einsum": lambda p: torch.einsum("bii->bi", p),
    "trace by einsum": lambda p: torch.einsum("bii->b", p),
    "scaled by a diagonal": lambda p: torch.einsum("bii,bij->bij", p, p),
    "diagonal": lambda p: torch.diagonal(p, dim1=1, dim2=2),
    "diagonal of the last dims": lambda p: p.diagonal(offset=1, dim1=-2, dim2=-1),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "dp2 tp2 zero3"])
@pytest.mark.parametrize("case", CASES)
def test_diagonals_of_rows(case: str, layout: str) -> None:
    train_as_plain(Products(CASES[case]).double(), layout, [(_random(8, 4, 6),), (_random(7, 4, 6),)])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.norm(self.conv(x)).sin().mean(2))
        return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_instance_norms_with_running_statistics(layout: str) -> None:
    x, y = _random(8, 3, 6), torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])
    model = Normed().double()
    program = train_as_plain(model, layout, [(x, y)] * 2, F.cross_entropy)
    del program


def test_outputs_of_instance_norms() -> None:
    x, y = _random(8, 3, 6), torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])
    model = Normed().double()
    program = quintnet.compile(model, Mesh(dp=2), (x, y), loss_fn=F.cross_entropy, microbatches=2)
    program.step((x, y))
    torch.testing.assert_close(program(x), model.eval()(x).detach(), rtol=1e-9, atol=1e-9)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 6, mode="max", padding_idx=0)
        self.last = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.bag(ids)))
        return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bags_with_a_padding_row(layout: str) -> None:
    ids = torch.randint(9, (8, 4), generator=torch.Generator().manual_seed(1))
    ids[0] = 0  # nothing is in it
    train_as_plain(Bags().double(), layout, [(ids, ids[:, 0] % 5)] * 2, F.cross_entropy)
