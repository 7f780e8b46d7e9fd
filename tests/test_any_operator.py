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
from .unruled import cubed, heads


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


def _columns(net: Net, h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for t in range(4):
        out[:, t] = h[:, t] * (t + 1)
    return out.square().mean()


def _masked(net: Net, h: Tensor) -> Tensor:
    h = h * 1
    h[h > 0.5] = 0.25
    return h.square().mean()


def _rotary(net: Net, h: Tensor) -> Tensor:
    """Positions as complex numbers of absolute value 1, as Llama's own code has them."""
    angles = torch.outer(torch.arange(2.0), torch.tensor([1.0])).double()
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_real(torch.view_as_complex(h.reshape(-1, 2, 1, 2)) * turns.reshape(1, 2, 1)).flatten(2)
    return turned.square().mean() + turned.sin().mean()


def _checked(net: Net, h: Tensor) -> Tensor:
    """Checks of values, which raise for bad ones, and decide nothing else."""
    if h.isnan().any():
        raise ValueError(f"{h} is not a number")
    assert (h.abs() < 1e6).all(), "too large"
    if not torch.all(h < 1e6):
        raise ValueError("too large")
    labels = (h.detach() * 4).long() % 4
    if labels.max() >= 4 or labels.min() < 0:
        raise IndexError("a label is out of range")
    return F.cross_entropy(h, labels[:, 0], reduction="sum")


def _parts(**parts: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    return parts


def _ids(h: Tensor) -> Tensor:
    return (h.detach() * 4).long() % 4


# with layers of their own
LAYERS: dict[str, tuple[dict[str, Callable[[], nn.Module]], Callable[[Net, Tensor], Tensor]]] = {
    "lstm": (
        _parts(rnn=lambda: nn.LSTM(2, 3, batch_first=True)),
        lambda net, h: net.rnn(h.reshape(-1, 2, 2))[0].square().mean(),
    ),
    "lstm, two layers, both ways": (
        _parts(rnn=lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True)),
        lambda net, h: net.rnn(h.reshape(-1, 2, 2).transpose(0, 1))[1][0].square().sum(),
    ),
    "gru": (
        _parts(rnn=lambda: nn.GRU(2, 3, batch_first=True)),
        lambda net, h: net.rnn(h.reshape(-1, 2, 2))[0].square().mean(),
    ),
    "rnn": (
        _parts(rnn=lambda: nn.RNN(2, 3, batch_first=True, nonlinearity="relu")),
        lambda net, h: net.rnn(h.reshape(-1, 2, 2))[0].square().mean(),
    ),
    "lstm cell": (
        _parts(cell=lambda: nn.LSTMCell(4, 3)),
        lambda net, h: net.cell(h, net.cell(h))[0].square().mean(),
    ),
    "gru cell": (_parts(cell=lambda: nn.GRUCell(4, 3)), lambda net, h: net.cell(h, net.cell(h)).square().mean()),
    "rnn cell": (_parts(cell=lambda: nn.RNNCell(4, 3)), lambda net, h: net.cell(h).square().mean()),
    "bags": (
        _parts(bag=lambda: nn.EmbeddingBag(4, 4)),
        lambda net, h: (h + net.bag(_ids(h))).square().mean(),
    ),
    "bags, added up, with a padding row": (
        _parts(bag=lambda: nn.EmbeddingBag(4, 4, mode="sum", padding_idx=1)),
        lambda net, h: (h + net.bag(_ids(h))).square().mean(),
    ),
    "bags, means without a padding row": (
        _parts(bag=lambda: nn.EmbeddingBag(4, 4, mode="mean", padding_idx=1)),
        lambda net, h: (h + net.bag(_ids(h))).square().mean(),
    ),
    "bags, weighted": (
        _parts(bag=lambda: nn.EmbeddingBag(4, 4, mode="sum")),
        lambda net, h: (h + net.bag(_ids(h), per_sample_weights=h)).square().mean(),
    ),
    "bags, largest": (
        _parts(bag=lambda: nn.EmbeddingBag(4, 4, mode="max")),
        lambda net, h: (h + net.bag(_ids(h))).square().mean(),
    ),
    "bilinear": (_parts(bi=lambda: nn.Bilinear(4, 4, 3)), lambda net, h: net.bi(h, h.flip(1)).square().mean()),
}
EVERYWHERE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "columns that are written": _columns,
    "a mask that is written": _masked,
    "rotary positions": _rotary,
    "checks of values": _checked,
    "lu": lambda net, h: torch.linalg.lu(h.reshape(-1, 2, 2) + 3 * torch.eye(2))[2].square().sum(),
    "pseudo-inverse": lambda net, h: torch.linalg.pinv(h.reshape(-1, 2, 2)).atan().mean(),
    "svd": lambda net, h: torch.svd(h.reshape(-1, 2, 2))[1].square().mean(),
    "logarithms of determinants": lambda net, h: torch.logdet(
        h.reshape(-1, 2, 2) @ h.reshape(-1, 2, 2).mT + torch.eye(2).double()
    ).mean(),
    "stft": lambda net, h: (
        torch.stft(h, 2, 1, window=torch.ones(2).double(), return_complex=True).abs().square().mean()
    ),
    "as_strided": lambda net, h: h.contiguous().as_strided((h.shape[0], 2, 2), (4, 1, 2)).sin().mean(),
    "hfft": lambda net, h: torch.fft.hfft(h.to(torch.complex128), n=4).square().mean(),
    "adaptive pools": lambda net, h: (
        F.adaptive_avg_pool1d(h[:, None], 2).square().mean()
        + F.adaptive_max_pool3d(h.reshape(-1, 1, 1, 2, 2), (1, 1, 2)).square().mean()
    ),
    "cross": lambda net, h: torch.cross(h[:, :3], h[:, 1:], dim=1).square().mean(),
    "largest norm": lambda net, h: h.norm(p=float("inf"), dim=1).mean() + torch.linalg.vector_norm(h, 0.5, 1).mean(),
    "diag_embed": lambda net, h: torch.diag_embed(h).matrix_exp().square().mean(),
    "repeat": lambda net, h: h.repeat(1, 2).square().mean() + h.repeat(2, 1).square().mean(),
    "unfold": lambda net, h: (
        F.fold(F.unfold(h.reshape(-1, 1, 2, 2), 2, padding=1), (2, 2), 2, padding=1).square().mean()
    ),
    "pixel shuffle": lambda net, h: F.pixel_shuffle(h.reshape(-1, 4, 1, 1), 2).square().mean(),
    "reflected and replicated padding": lambda net, h: (
        F.pad(h[:, None], (1, 1), mode="reflect").square().mean()
        + F.pad(h[:, None], (1, 1), mode="replicate").square().mean()
    ),
    "bicubic": lambda net, h: F.interpolate(h.reshape(-1, 1, 2, 2), scale_factor=2, mode="bicubic").square().mean(),
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
    "dp2, 2 microbatches": ({"dp": 2}, {"microbatches": 2}),
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


@pytest.mark.sample(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_on_every_layout(name: str, layout: str) -> None:
    torch.manual_seed(0)
    axes, options = LAYOUTS[layout]
    _require_equal(Net(EVERYWHERE[name]).double(), axes, **options)


@pytest.mark.parametrize("axes", [{}, {"pp": 2}], ids=str)
def test_no_rule_is_needed_where_nothing_is_split(axes: dict[str, int]) -> None:
    def unruled(net: Net, h: Tensor) -> Tensor:
        return cubed(net.last(h)).sum()

    torch.manual_seed(0)
    _require_equal(Net(unruled, last=nn.Linear(4, 4)).double(), axes)
    with pytest.raises(quintnet.CompileError, match=r"QN202[\s\S]*cubed"):
        quintnet.compile(Net(unruled, last=nn.Linear(4, 4)), Mesh(dp=2), (torch.randn(8, 4),))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_every_layout(name: str, layout: str) -> None:
    torch.manual_seed(0)
    axes, options = LAYOUTS[layout]
    parts, made = LAYERS[name]
    _require_equal(Net(made, **{part: make() for part, make in parts.items()}).double(), axes, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rule_of_ones_own_has_tuples_and_numbers(layout: str) -> None:
    """A tuple of results, a dim of three factors of which one is a number, and a number among the arguments, which is
    the same on every rank: heads are whole."""

    def attends(net: Net, h: Tensor) -> Tensor:
        q, k, v = heads(net.last(h).reshape(-1, 2, 12), 2)
        return F.scaled_dot_product_attention(q, k, v).square().mean()

    torch.manual_seed(0)
    axes, options = LAYOUTS[layout]
    rule = quintnet.rule(
        torch.ops.quintnet_tests.heads.default, "b s (3 h d) -> [b h s d, b h s d, b h s d]", whole="h", work="view"
    )
    _require_equal(Net(attends, last=nn.Linear(4, 24)).double(), axes, rules=[rule], **options)


def test_what_a_module_checks_it_checks_on_the_first_batch() -> None:
    """A program does not check, but the module runs on rows of the first batch beside it."""

    def checks(net: Net, h: Tensor) -> Tensor:
        if (h.detach() < 1e6).all():
            raise ValueError("not large enough")
        return h.square().mean()

    torch.manual_seed(0)
    batch = (torch.randn(8, 4),)
    with pytest.raises(ValueError, match="not large enough"):
        quintnet.compile(Net(checks), Mesh(dp=2), batch).step(batch)
    quintnet.compile(Net(checks), Mesh(dp=2), batch, check="off").step(batch)
