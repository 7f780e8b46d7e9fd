"""Operators outside transformers, in a small module: loss and gradients of the unsplit one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .models import reference, worst_error


class Net(nn.Module):
    """A linear layer, and what a test makes of it."""

    def __init__(self, made: Callable[[Net, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(4, 4), made
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self, self.linear(x))


def _complex(net: Net, h: Tensor) -> Tensor:
    turned = torch.view_as_complex(h.reshape(-1, 2, 2)) * torch.polar(
        torch.ones(2).double(), torch.arange(2.0).double()
    )
    return torch.view_as_real(turned).square().mean()


def _written(net: Net, h: Tensor) -> Tensor:
    h = h * 1
    h[:, 1] = h[:, 0] * 2
    return h.square().mean()


def _spd(net: Net) -> Tensor:
    weight = net.linear.weight
    return weight @ weight.mT + torch.eye(4, dtype=weight.dtype)


EVERYWHERE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "fft": lambda net, h: torch.fft.irfft(torch.fft.rfft(h) * 2, n=4).sin().square().mean(),
    "fft2": lambda net, h: torch.fft.fft2(h.reshape(-1, 2, 2)).real.square().mean(),
    "complex rotation": _complex,
    "matrix_exp of a weight": lambda net, h: (h @ torch.matrix_exp(net.linear.weight)).square().mean(),
    "inverse of a weight": lambda net, h: (h @ torch.linalg.inv(net.linear.weight)).square().mean(),
    "solve": lambda net, h: torch.linalg.solve(net.linear.weight, h.T).square().mean(),
    "determinants": lambda net, h: torch.linalg.det(h.reshape(-1, 2, 2)).square().mean(),
    "determinant of a weight": lambda net, h: h.square().mean() + torch.linalg.det(net.linear.weight),
    "cholesky": lambda net, h: h.square().mean() + torch.linalg.cholesky(_spd(net)).sum(),
    "eigvalsh": lambda net, h: h.square().mean() + torch.linalg.eigvalsh(_spd(net)).square().sum(),
    "qr": lambda net, h: h.square().mean() + torch.linalg.qr(net.linear.weight)[1].square().sum(),
    "diagonal and trace": lambda net, h: h.square().mean() + net.linear.weight.diag().sum() + net.linear.weight.trace(),
    "searchsorted": lambda net, h: (h * torch.searchsorted(torch.arange(4.0).double(), h.detach())).mean(),
    "bits": lambda net, h: (h * ((h.detach() * 10).long() & 5)).mean(),
    "max_unpool": lambda net, h: F.max_unpool1d(*F.max_pool1d(h[:, None], 2, return_indices=True), 2).square().mean(),
    "scatter_reduce": lambda net, h: (
        torch.zeros_like(h).scatter_reduce(1, (h.detach() * 4).long() % 4, h, "amax").square().mean()
    ),
    "index_reduce": lambda net, h: (
        torch.ones_like(h).index_reduce(1, torch.tensor([0, 1, 1, 2]), h, "prod").square().mean()
    ),
    "renorm": lambda net, h: torch.renorm(h, 2, 0, 1.0).square().mean(),
    "p-norm": lambda net, h: h.norm(p=3, dim=1).mean(),
    "cosine similarity": lambda net, h: F.cosine_similarity(h, h.roll(1, 1)).mean(),
    "cdist": lambda net, h: torch.cdist(h[:, None], h.flip(1)[:, None]).mean(),
    "circular padding": lambda net, h: F.pad(h[:, None], (1, 1), mode="circular").square().mean(),
    "interpolation": lambda net, h: F.interpolate(h[:, None], scale_factor=2, mode="linear").square().mean(),
    "a column that is written": _written,
    "repeat_interleave": lambda net, h: h.repeat_interleave(2, 0).square().mean(),
    "losses that are added up": lambda net, h: sum([h.square().mean(), h.abs().mean()]) + 3.0,  # type: ignore[list-item]
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2 x tp2": ({"dp": 2, "tp": 2}, {}),
    "pp2, 2 microbatches": ({"pp": 2}, {"microbatches": 2}),
}


def _require_equal(net: Net, axes: dict[str, int], **options: Any) -> None:
    twin = copy.deepcopy(net)
    batch = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
    program = quintnet.compile(net, Mesh(**axes), batch, **options)
    loss = float(program.step(batch).detach())
    expected, gradients = reference(twin, batch, None)
    found = {name: p.grad for name, p in program.named_parameters() if p.grad is not None}
    assert loss == pytest.approx(float(expected), rel=1e-9)
    assert worst_error(found, gradients)[0] < 1e-8


@pytest.mark.sample(20)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_on_every_layout(name: str, layout: str) -> None:
    torch.manual_seed(0)
    axes, options = LAYOUTS[layout]
    _require_equal(Net(EVERYWHERE[name]).double(), axes, **options)


@pytest.mark.parametrize("axes", [{}, {"pp": 2}], ids=str)
def test_no_rule_is_needed_where_nothing_is_split(axes: dict[str, int]) -> None:
    def triangle(net: Net, h: Tensor) -> Tensor:
        return torch.linalg.lu(net.last(h).view(-1, 2, 2))[2].square().sum()

    torch.manual_seed(0)
    _require_equal(Net(triangle, last=nn.Linear(4, 4)).double(), axes)
    with pytest.raises(quintnet.CompileError, match=r"QN202[\s\S]*linalg_lu"):
        quintnet.compile(Net(triangle, last=nn.Linear(4, 4)), Mesh(dp=2), (torch.randn(8, 4),))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_bags_of_embeddings(axes: dict[str, int]) -> None:
    def bags(net: Net, h: Tensor) -> Tensor:
        return (h + net.bag((h.detach() * 4).long() % 4)).square().mean()

    torch.manual_seed(0)
    _require_equal(Net(bags, bag=nn.EmbeddingBag(4, 4)).double(), axes)
