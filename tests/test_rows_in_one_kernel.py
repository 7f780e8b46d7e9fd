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


@pytest.mark.sample(1)
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


@pytest.mark.sample(1)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bags_with_a_padding_row(layout: str) -> None:
    ids = torch.randint(9, (8, 4), generator=torch.Generator().manual_seed(1))
    ids[0] = 0  # nothing is in it
    train_as_plain(Bags().double(), layout, [(ids, ids[:, 0] % 5)] * 2, F.cross_entropy)


class OwnFilters(nn.Module):
    """Each row makes the filters that it is convolved with."""

    def __init__(self, *, transposed: bool = False, biased: bool = False, dims: int = 1) -> None:
        super().__init__()
        self.channels, self.outputs, self.dims = 3, 4, dims
        self.filters = nn.Linear(6, self.channels * self.outputs * 3**dims)
        self.biases = nn.Linear(6, self.outputs) if biased else None
        self.mix, self.last = nn.Linear(6, 6), nn.Linear(self.outputs, 5)
        names = {1: (F.conv1d, F.conv_transpose1d), 2: (F.conv2d, F.conv_transpose2d)}
        self.convolve, self.transposed = names[dims][transposed], transposed

    def forward(self, x: Tensor) -> Tensor:
        rows, wide = x.shape[0], [6] * self.dims
        style = x.flatten(1)[:, :6]
        channels = (self.channels, self.outputs) if self.transposed else (self.outputs, self.channels)
        weight = self.filters(style).reshape(rows * channels[0], channels[1], *[3] * self.dims)
        bias = None if self.biases is None else self.biases(style).reshape(-1)
        image = self.mix(x).reshape(1, rows * self.channels, *wide)
        out = self.convolve(image, weight, bias, stride=2, padding=1, groups=rows)
        return self.last(out.reshape(rows, self.outputs, -1).tanh().mean(2))  # type: ignore[no-any-return]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options", [{}, {"biased": True}, {"transposed": True}, {"dims": 2, "transposed": True, "biased": True}], ids=str
)
def test_filters_of_each_row(options: dict[str, int], layout: str) -> None:
    sizes = (3, *[6] * options.get("dims", 1))
    batches = [(_random(rows, *sizes), torch.arange(rows) % 5) for rows in (8, 7)]
    train_as_plain(OwnFilters(**options).double(), layout, batches, F.cross_entropy)  # type: ignore[arg-type]


class MappedFilters(nn.Module):
    """``torch.vmap`` of a convolution over rows with filters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.last = nn.Linear(6, 4 * 3 * 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.filters(x[:, 0]).reshape(-1, 4, 3, 3)
        out = torch.vmap(lambda image, filters: F.conv1d(image[None], filters, padding=1)[0])(x, weight)
        return self.last(out.tanh().mean(2))  # type: ignore[no-any-return]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mapped_filters_of_each_row(layout: str) -> None:
    batches = [(_random(rows, 3, 6), torch.arange(rows) % 5) for rows in (8, 7)]
    train_as_plain(MappedFilters().double(), layout, batches, F.cross_entropy)


class Penalised(nn.Module):
    """The gradient of a discriminator with filters of each row, as in R1 penalties."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        self.net = OwnFilters(**options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():  # also where the module is evaluated
            x = x.detach().requires_grad_()
            out = self.net(x)
            (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + gradient.square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"transposed": True, "dims": 2}], ids=str)
def test_penalties_of_filters_of_each_row(options: dict[str, int], layout: str) -> None:
    sizes = (3, *[6] * options.get("dims", 1))
    batches = [(_random(rows, *sizes), torch.arange(rows) % 5) for rows in (8, 7)]
    train_as_plain(Penalised(**options).double(), layout, batches)
