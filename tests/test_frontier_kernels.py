"""Derivatives in generated code against autograd's: memory formats, mutation inside a derivative, odd operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import quintnet

from .frontier import LAYOUTS, refused, trains_equally

torch.set_num_threads(1)
TWO = {name: LAYOUTS[name] for name in ("dp2", "tp2")}


class Between(nn.Module):
    """A Linear, and what is in question: ``function(module, x)``, which may use ``parts``."""

    def __init__(self, function: Callable[..., Tensor], features: int = 4, **parts: nn.Module) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, features), function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.function(self, *batch)


class Normalized(nn.Module):
    """GroupNorm, and a gradient that arrives as ``back`` leaves it."""

    def __init__(self, back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)
        self.linear, self.back = nn.Linear(8, 4), back

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.back(self.norm(self.convolution(x)).tanh())).square().mean()  # type: ignore[no-any-return]


def _image() -> Tensor:
    return torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_group_norm_with_a_gradient_that_is_not_contiguous(last: bool) -> None:
    x = _image().to(memory_format=torch.channels_last) if last else _image()
    trains_equally(lambda: Normalized(lambda h: h.flatten(2).transpose(1, 2)), (x,), meshes=LAYOUTS)
    trains_equally(lambda: Normalized(lambda h: h.mean((2, 3))), (x,), meshes=TWO)


class Positional(nn.Module):
    """The positional convolution of Wav2Vec2: ranks hold slices along the normalized weight's last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.c = weight_norm(nn.Conv1d(16, 16, 4, padding=2), dim=2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x)).transpose(1, 2)
        return self.b(F.gelu(self.c(h)[..., :-1]).transpose(1, 2))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_weight_norm_along_the_last_dim() -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    trains_equally(Positional, (x, x.sin()), F.mse_loss, TWO)
    given = {"*original1": {"tp": "R"}}
    trains_equally(Positional, (x, x.sin()), F.mse_loss, {"tp2": TWO["tp2"]}, plan={"parameters": given})


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SIGNS = torch.where(torch.rand(8, generator=torch.Generator().manual_seed(1)) > 0.5, 1.0, -1.0)
DERIVATIVES: dict[str, Callable[[], nn.Module]] = {
    "norm of order 3": lambda: Between(lambda s, x, y: s.inner(x).norm(p=3, dim=1).mean()),
    "normalize of order 3": lambda: Between(lambda s, x, y: F.normalize(s.inner(x), p=3).square().sum()),
    "distance of order 1.5": lambda: Between(lambda s, x, y: F.pairwise_distance(s.inner(x), x, p=1.5).mean()),
    "sgn": lambda: Between(lambda s, x, y: (s.inner(x) * torch.sgn(s.inner(x))).mean()),
    "sgn alone": lambda: Between(lambda s, x, y: torch.sgn(s.inner(x)).mean() + s.inner(x).sum()),
    "pool to one": lambda: Between(
        lambda s, x, y: s.pool(s.inner(x).reshape(-1, 2, 2).transpose(1, 2)).square().mean(),
        pool=nn.AdaptiveAvgPool1d(1),
    ),
    "pool after a norm": lambda: Between(
        lambda s, x, y: s.pool(s.norm(s.inner(x).reshape(-1, 2, 2, 4)).permute(0, 3, 1, 2)).square().mean(),
        features=16,
        pool=nn.AdaptiveAvgPool2d(1),
        norm=nn.LayerNorm(4),
    ),
    "covariance": lambda: Between(
        lambda s, x, y: torch.cov(h := s.inner(x).T, correction=0).square().sum() + torch.cov(h[0], aweights=y + 2)
    ),
    "correlation": lambda: Between(lambda s, x, y: torch.corrcoef(s.inner(x).T).square().sum()),
    "combinations": lambda: Between(
        lambda s, x, y: (s.inner(x)[:, :1] * torch.combinations(s.inner.bias, 3).prod(1)).square().mean()
    ),
    "statistics of a batch norm": lambda: Between(
        lambda s, x, y: sum(
            z.exp().mean() for z in torch.native_batch_norm(s.inner(x), None, None, None, None, True, 1, 1)
        )
    ),
    "circular padding": lambda: Between(
        lambda s, x, y: F.pad(s.inner(x).unsqueeze(1), (1, 2), mode="circular").square().mean()
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_that_change_values_in_place(name: str) -> None:
    trains_equally(DERIVATIVES[name], (X, SIGNS), meshes=TWO)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "margin ranking": lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], y, 0.3),
    "hinge embedding": lambda out, y: F.hinge_embedding_loss(5 * out[:, 0], y),
    "cosine embedding": lambda out, y: F.cosine_embedding_loss(out, out.sin(), y, 0.2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOSSES)
def test_operators_without_a_rule_that_change_values_in_place(name: str) -> None:
    options: dict[str, Any] = {"plan": {"unknown_ops": "replicate"}}
    trains_equally(lambda: nn.Linear(4, 4), (X, SIGNS), LOSSES[name], TWO, **options)


class TiedWithoutGradient(nn.Module):
    """Its first stage uses the weight without a gradient, its last one with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            h = x @ self.weight
        return (self.inner(h) @ self.weight).square().mean()


@pytest.mark.slow
def test_a_tied_parameter_of_which_one_use_has_no_gradient() -> None:
    meshes = {name: LAYOUTS[name] for name in ("dp2", "pp2")} | {"dp2 x pp2": {"dp": 2, "pp": 2}}
    trains_equally(TiedWithoutGradient, (X, SIGNS), meshes=meshes)


class Equilibrium(nn.Module):
    """Rounds without a gradient, then one with (deep equilibrium models)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4) / 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        with torch.no_grad():
            for _ in range(3):
                h = torch.tanh(self.inner(h) @ self.weight + x)
        return torch.tanh(self.inner(h) @ self.weight + x).square().mean()


def test_rounds_without_a_gradient_before_one_with() -> None:
    trains_equally(Equilibrium, (X, SIGNS), meshes={name: LAYOUTS[name] for name in ("pp2", "dp2 x tp2")})


def _masked(h: Tensor) -> Tensor:
    return torch.index_put(h, (h > 0,), h.mean()).square().mean()


ODD: dict[str, Callable[[], nn.Module]] = {
    "with a gradient and detached": lambda: Between(
        lambda s, x, y: F.mse_loss(v := torch.cat([h := s.inner(x), h.sin()], 1), v.detach() * 0.5), features=6
    ),
    "a parameter times itself without a gradient": lambda: Between(
        lambda s, x, y: s.inner(x).mean() + (s.inner.bias * s.inner.bias.detach()).mean()
    ),
    "index_put of bools": lambda: Between(lambda s, x, y: _masked(s.inner(x))),
    "index_put of bools, added": lambda: Between(
        lambda s, x, y: torch.index_put(h := s.inner(x), (y > 0,), h.mean(), accumulate=True).square().mean()
    ),
    "no columns": lambda: Between(lambda s, x, y: (h := s.inner(x)).sum() + (h[:, :0] * 2).sum()),
    "0-d": lambda: Between(
        lambda s, x, y: (m := s.inner(x).square().mean().mean(dim=0)) + m.gather(0, torch.tensor(0)) * m.detach()
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ODD)
def test_odd_operators(name: str) -> None:
    trains_equally(ODD[name], (X, SIGNS), meshes=TWO)


def test_lstm_in_float32() -> None:
    """oneDNN's kernel is for float32 alone: compiled, it is the recurrence that float64 has."""
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 4, batch_first=True), torch.randn(8, 3, 4)
    expected = copy.deepcopy(model)(x)[0].square().mean()
    loss = quintnet.compile(
        model, quintnet.Mesh(dp=2), (x, x[:, 0]), loss_fn=lambda out, y: out[0].square().mean() + 0 * y.sum()
    ).step((x, x[:, 0]))
    torch.testing.assert_close(loss, expected.detach())


REFUSED: dict[str, tuple[Callable[..., Tensor], str, str, dict[str, nn.Module]]] = {
    "sparse": (
        lambda s, i: s.inner(s.table(i)).mean(), "QN105", "sparse gradient", {"table": nn.Embedding(8, 4, sparse=True)}
    ),
    "sparse, in bags": (
        lambda s, i: s.inner(s.table(i)).mean(), "QN105", "sparse gradient",
        {"table": nn.EmbeddingBag(8, 4, sparse=True)},
    ),
    "sparse, of gather": (
        lambda s, i: s.inner.weight.gather(0, i.expand(-1, 4) % 4, sparse_grad=True).mean(),
        "QN105", "sparse_grad=False", {},
    ),
    "a number of a tensor": (
        lambda s, i: s.inner(i * s.inner.weight.new_ones(4)).mean() / i.sum().item(), "QN101", "without .item()", {}
    ),
    "packed sequences": (
        lambda s, i: s.layer(
            nn.utils.rnn.pack_padded_sequence(s.inner.weight[:1].expand(8, 4, 4), i[:, 0].clamp(1, 4), True, False)
        )[0].data.mean(),
        "QN101", "packed sequences", {"layer": nn.GRU(4, 4, batch_first=True)},
    ),
    "targets one behind the other": (
        lambda s, i: F.ctc_loss(
            s.inner.weight.log_softmax(1)[:, None].expand(-1, 8, -1), 1 + i.flatten() % 3, (4,) * 8, (1,) * 8
        ),
        "QN101", "padded targets", {},
    ),
    "values of a mask": (
        lambda s, i: torch.index_put(h := s.inner(i * s.inner.weight.new_ones(4)), (h > 9,), h.new_ones(0)).mean(),
        "QN101", "values of the mask", {},
    ),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_cause(name: str) -> None:
    function, code, cause, parts = REFUSED[name]
    ids = torch.arange(8)[:, None]
    refused(lambda: Between(function, **copy.deepcopy(parts)), (ids,), code, cause=cause, meshes=TWO)
