"""Modules that people write outside transformers and that were refused or crashed once, each as its users have it.

Three optimizer steps beside the plain module, over data, tensor and pipeline ranks. What is still refused is refused at
compile time, with the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from .frontier import TWO_RANKS, refused, trains_equally

torch.set_num_threads(1)
DICE = torch.Generator().manual_seed(0)
X = torch.randn(8, 4, generator=DICE)
LONGER = torch.randn(8, 6, 4, generator=DICE)
IDS = torch.randint(32, (8, 5), generator=DICE)
Body = Callable[[Any, Tensor], Tensor]
Parts = dict[str, Callable[[], nn.Module]]


class Net(nn.Module):
    """A Linear, and what is in question: ``body(net, x)``, with modules and parameters of its own."""

    def __init__(self, body: Body, **parts: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.body = nn.Linear(4, 4), body
        for name, part in parts.items():
            setattr(self, name, part())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _of_hidden(body: Body) -> Body:
    return lambda net, x: body(net, net.linear(x))


def _position_convolution(net: Any, x: Tensor) -> Tensor:
    h = F.gelu(net.wide(net.linear(x))).transpose(1, 2)
    return net.narrow(F.gelu(net.convolution(h)[..., :-1]).transpose(1, 2)).square().mean()  # type: ignore[no-any-return]


def _twice_with_one_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = x @ net.weight
    return (net.linear(h) @ net.weight).square().mean()  # type: ignore[no-any-return]


def _equilibrium(net: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(3):
            h = torch.tanh(net.linear(h) + x)
    return net.head(torch.tanh(net.linear(h) + x)).square().mean()  # type: ignore[no-any-return]


def _gradient_penalty(net: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = net.head(torch.tanh(net.linear(x)))
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean() + y.mean()  # type: ignore[no-any-return]


def _physics(net: Any, x: Tensor) -> Tensor:
    def u(at: Tensor) -> Tensor:
        return net.head(torch.tanh(net.linear(at))).sum()  # type: ignore[no-any-return]

    second = torch.vmap(torch.func.hessian(u))(x)
    return torch.func.grad(u)(x).square().mean() + second.square().mean() + u(x)


def _with_own_residual(net: Any, x: Tensor) -> Tensor:
    both = torch.cat([net.linear(x), net.linear(x).sin()], 1)
    return F.mse_loss(both, both.detach() * 0.5)


def _of_images(net: Any, x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(net.norm(net.linear(x)).permute(0, 3, 1, 2), 1).square().mean()


def _positive_definite(net: Any) -> Tensor:
    return net.linear.weight @ net.linear.weight.T + torch.eye(4, dtype=net.linear.weight.dtype)  # type: ignore[no-any-return]


HEAD: Parts = {"head": lambda: nn.Linear(4, 1)}
CASES: dict[str, tuple[Body, Tensor, Parts]] = {
    "weight_norm along the last dim": (
        _position_convolution,
        LONGER,
        {
            "wide": lambda: nn.Linear(4, 8),
            "convolution": lambda: weight_norm(nn.Conv1d(8, 8, 4, padding=2), dim=2),
            "narrow": lambda: nn.Linear(8, 4),
        },
    ),
    "norm, p=3": (_of_hidden(lambda net, h: h.norm(p=3, dim=1).mean()), X, {}),
    "vector_norm, p=3": (_of_hidden(lambda net, h: torch.linalg.vector_norm(h, 3)), X, {}),
    "normalize, p=3": (_of_hidden(lambda net, h: F.normalize(h, p=3).sum()), X, {}),
    "pairwise_distance, p=1.5": (lambda net, x: F.pairwise_distance(net.linear(x), x, p=1.5).sum(), X, {}),
    "LSTM": (
        lambda net, x: net.recurrent(x)[0].mean(),
        LONGER,
        {"recurrent": lambda: nn.LSTM(4, 4, batch_first=True)},
    ),
    "LSTMCell": (_of_hidden(lambda net, h: net.cell(h)[0].mean()), X, {"cell": lambda: nn.LSTMCell(4, 4)}),
    "an embedding with max_norm": (
        lambda net, ids: net.linear(net.embedding(ids)).mean(),
        IDS,
        {"embedding": lambda: nn.Embedding(32, 4, max_norm=1.0)},
    ),
    "index_put by a mask": (
        _of_hidden(lambda net, h: torch.index_put(h, (h > 0,), h.mean()).square().mean()),
        X,
        {},
    ),
    "a table made of the batch": (
        lambda net, x: F.embedding((x[:, 0].abs() * 3).long() % 8, net.linear(x)).square().mean(),
        X,
        {},
    ),
    "a value with a gradient and without": (
        lambda net, x: net.linear(x).mean() + (net.scale * net.scale.detach()).mean(),
        X,
        {"scale": lambda: nn.Parameter(torch.ones(3, 4))},
    ),
    "a value beside its own detach": (_with_own_residual, X, {}),
    "a weight used twice, with one gradient": (
        _twice_with_one_gradient,
        X,
        {"weight": lambda: nn.Parameter(torch.randn(4, 4))},
    ),
    "a deep equilibrium": (_equilibrium, X, {"head": lambda: nn.Linear(4, 4)}),
    "checkpoint, reentrant": (
        lambda net, x: checkpoint(net.head, torch.tanh(net.linear(x)), use_reentrant=True).square().mean(),
        X,
        HEAD,
    ),
    "sgn": (_of_hidden(lambda net, h: (h * torch.sgn(h)).mean()), X, {}),
    "a size of 0": (_of_hidden(lambda net, h: h.mean() + (h[:, :0] * 2).sum()), X, {}),
    "mean of a scalar": (_of_hidden(lambda net, h: h.mean().mean(dim=0)), X, {}),
    "gather of a scalar": (_of_hidden(lambda net, h: h.mean().gather(0, torch.tensor(0))), X, {}),
    "fft2": (_of_hidden(lambda net, h: torch.fft.fft2(h).abs().mean()), X, {}),
    "orthogonal": (
        _of_hidden(lambda net, h: net.turn(h).sin().mean()),
        X,
        {"turn": lambda: orthogonal(nn.Linear(4, 4))},
    ),
    "spectral_norm": (
        _of_hidden(lambda net, h: net.part(h).mean()),
        X,
        {"part": lambda: spectral_norm(nn.Linear(4, 4))},
    ),
    "bits": (_of_hidden(lambda net, h: (h * ((h.detach() * 100).long() & 15)).mean()), X, {}),
    "solve": (
        _of_hidden(lambda net, h: torch.linalg.solve(_positive_definite(net), h.T).square().mean()),
        X,
        {},
    ),
    "eigvalsh": (_of_hidden(lambda net, h: torch.linalg.eigvalsh(_positive_definite(net)).mean() + h.mean()), X, {}),
    "diag_embed and trace": (
        _of_hidden(lambda net, h: torch.diag_embed(h).square().mean() + torch.trace(h @ h.T)),
        X,
        {},
    ),
    "cross": (_of_hidden(lambda net, h: torch.cross(h[:, :3], h[:, 1:], dim=1).square().mean()), X, {}),
    "rsub": (_of_hidden(lambda net, h: torch.rsub(h, h.sin()).square().mean()), X, {}),
    "nanmean": (_of_hidden(lambda net, h: torch.where(h > 0, h, torch.nan).nanmean()), X, {}),
    "renorm": (_of_hidden(lambda net, h: torch.renorm(h, 2, 0, 0.5).square().mean()), X, {}),
    "adaptive pooling of one dim": (
        lambda net, x: net.head(net.pool(net.linear(x).transpose(1, 2)).flatten(1)).mean(),
        LONGER,
        HEAD | {"pool": lambda: nn.AdaptiveAvgPool1d(1)},
    ),
    "circular padding": (
        _of_hidden(lambda net, h: net.convolution(h).square().mean()),
        LONGER,
        {"convolution": lambda: nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular")},
    ),
    "the head of a ConvNeXt": (_of_images, torch.randn(8, 3, 3, 4, generator=DICE), {"norm": lambda: nn.LayerNorm(4)}),
    "a gradient penalty": (_gradient_penalty, X, HEAD),
    "an equation of derivatives": (_physics, X, HEAD),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_modules_of_many_kinds_train_as_the_plain_ones(name: str) -> None:
    body, x, parts = CASES[name]
    trains_equally(lambda: Net(body, **parts), (x,), meshes=TWO_RANKS)


def test_what_depends_on_values_is_refused_with_its_cause() -> None:
    lengths = torch.tensor([3] * 8)
    sparse = Net(lambda net, ids: net.linear(net.table(ids)).mean(), table=lambda: nn.Embedding(32, 4, sparse=True))
    packed = Net(
        lambda net, x: net.part(pack_padded_sequence(net.linear(x), lengths, batch_first=True))[1].mean(),
        part=lambda: nn.GRU(4, 4, batch_first=True),
    )
    table = Net(CASES["a table made of the batch"][0])
    refused(lambda: sparse, (IDS,), "QN105", cause="sparse gradient", meshes=TWO_RANKS)
    refused(lambda: packed, (LONGER,), "QN101", cause="packed sequences", meshes=TWO_RANKS)
    refused(lambda: table, (X,), "QN104", cause="brings rows together", meshes=TWO_RANKS, microbatches=2)
