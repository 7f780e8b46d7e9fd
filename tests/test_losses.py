"""Losses over ranks and microbatches: exactly that of the whole batch, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .models import reference, worst_error

torch.set_num_threads(1)
ROWS, LENGTH, CLASSES, WIDTH = 8, 6, 12, 16
WEIGHTS = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


class Tagger(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def _tokens(out: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), **options)  # type: ignore[arg-type]


def _z_loss(out: Tensor, labels: Tensor) -> Tensor:
    return _tokens(out, labels) + 1e-2 * torch.logsumexp(out, -1).square().mean()


def _focal(out: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
    return ((1 - torch.exp(-each)).square() * each).sum() / (labels != -100).sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _tokens,
    "sum": lambda out, y: _tokens(out, y, reduction="sum"),
    "weighted": lambda out, y: _tokens(out, y, weight=WEIGHTS),
    "smoothed": lambda out, y: _tokens(out, y, label_smoothing=0.1),
    "weighted and smoothed": lambda out, y: _tokens(out, y, weight=WEIGHTS, label_smoothing=0.1),
    "other ignored label": lambda out, y: _tokens(out, y.clamp(min=0), ignore_index=0),
    "z-loss": _z_loss,
    "focal": _focal,
    "mse": lambda out, y: F.mse_loss(out, F.one_hot(y.clamp(min=0), CLASSES).to(out.dtype)),
    "mse, sum": lambda out, y: F.mse_loss(out, F.one_hot(y.clamp(min=0), CLASSES).to(out.dtype), reduction="sum"),
    "huber": lambda out, y: F.smooth_l1_loss(out, F.one_hot(y.clamp(min=0), CLASSES).to(out.dtype)),
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y.clamp(min=0), CLASSES).to(out.dtype)),
    "soft labels": lambda out, y: F.cross_entropy(
        out.flatten(0, 1), F.one_hot(y.clamp(min=0).flatten(), CLASSES).to(out.dtype) * 0.9 + 0.1 / CLASSES
    ),
    "kl": lambda out, y: F.kl_div(
        out.log_softmax(-1),
        F.one_hot(y.clamp(min=0), CLASSES).to(out.dtype),
        reduction="batchmean",
    ),
}
LAYOUTS = [
    (quintnet.Mesh(dp=4), 2),
    (quintnet.Mesh(tp=2), 4),
    (quintnet.Mesh(pp=2), 8),
    (quintnet.Mesh(pp=2, dp=2, tp=2), 2),
]


def _batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=dice, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=dice)
    labels[0] = -100  # a microbatch, or a rank, may have no label at all
    labels[1, 1:] = -100
    labels[5, :2] = -100
    return x, labels


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("mesh", "microbatches"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_that_of_the_whole_batch(name: str, mesh: quintnet.Mesh, microbatches: int) -> None:
    expected_loss, expected = reference(_model(), _batch(), LOSSES[name])
    program = quintnet.compile(_model(), mesh, _batch(), loss_fn=LOSSES[name], microbatches=microbatches)
    loss = program.step(_batch())
    assert abs(float(loss - expected_loss)) <= 1e-9 * abs(float(expected_loss))
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


def _contrastive(out: Tensor, labels: Tensor) -> Tensor:
    """Each sample against all others of the batch."""
    z = F.normalize(out.mean(1), dim=-1)
    scores = z @ z.t() / 0.1
    return F.cross_entropy(scores, torch.arange(scores.shape[0]))


@pytest.mark.slow
def test_a_contrastive_loss_is_exact_or_refused() -> None:
    with pytest.raises(quintnet.CompileError, match="QN104"):
        quintnet.compile(_model(), quintnet.Mesh(dp=2), _batch(), loss_fn=_contrastive, microbatches=2)
    for mesh in (quintnet.Mesh(dp=2), quintnet.Mesh(tp=2), quintnet.Mesh(pp=2, dp=2)):
        expected_loss, expected = reference(_model(), _batch(), _contrastive)
        program = quintnet.compile(_model(), mesh, _batch(), loss_fn=_contrastive)
        assert abs(float(program.step(_batch()) - expected_loss)) < 1e-9
        error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
        assert error < 1e-9, worst


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_batch_statistics_are_exact_or_refused(keeps: bool) -> None:
    """BatchNorm that keeps running statistics, and one that only uses those of the batch."""
    using = Tagger(nn.Sequential(_Transposed(nn.BatchNorm1d(WIDTH, track_running_stats=keeps)))).double()
    with pytest.raises(quintnet.CompileError, match="QN104"):
        quintnet.compile(using, quintnet.Mesh(dp=2), _batch(), loss_fn=_tokens, microbatches=2)
    expected_loss, expected = reference(using, _batch(), _tokens)
    using.zero_grad(set_to_none=True)
    program = quintnet.compile(using, quintnet.Mesh(dp=2), _batch(), loss_fn=_tokens)
    assert abs(float(program.step(_batch()) - expected_loss)) < 1e-9
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)  # type: ignore[union-attr]
    assert error < 1e-9, worst


class _Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)
