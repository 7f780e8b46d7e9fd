"""Every loss of torch.nn with every reduction, in a small module: what it gives on layouts against the unsplit module.

``reduction="none"`` leaves a value for each row or element; those are squared and averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import loss as of_torch

import quintnet

from .models import reference, worst_error

ROWS, WIDTH, CLASSES, STEPS = 8, 6, 5, 4
LAYOUTS: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "dp2, 2 microbatches": ({"dp": 2}, {"microbatches": 2}),
    "tp2": ({"tp": 2}, {}),
    "pp2, 4 microbatches": ({"pp": 2}, {"microbatches": 4}),
    "pp2 x dp2 x tp2, 2 microbatches": ({"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2}),
}
LIMIT = 1e-9
REDUCTIONS = ("none", "mean", "sum")
Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """``compute(loss, out, labels)``: the loss of a model's output [rows, width] and of labels [rows]; ``options`` of
    the loss's class."""

    compute: Compute
    options: Mapping[str, Any] = field(default_factory=dict)
    reductions: tuple[str, ...] = REDUCTIONS


def _like(out: Tensor, labels: Tensor) -> Tensor:
    """Targets of the output's size, between 0 and 1."""
    return F.one_hot(labels, out.shape[-1]).to(out.dtype) * 0.8 + 0.1


def _sign(out: Tensor, labels: Tensor) -> Tensor:
    return 2 * F.one_hot(labels, out.shape[-1]).to(out.dtype) - 1


def _signs(labels: Tensor) -> Tensor:
    return (labels % 2 * 2 - 1).double()


def _elements(loss: nn.Module, out: Tensor, labels: Tensor) -> Tensor:
    return loss(out, _like(out, labels))


def _three(loss: nn.Module, out: Tensor, labels: Tensor) -> Tensor:
    return loss(out, out.roll(1, 1), out.flip(1))


def _many(out: Tensor, labels: Tensor) -> Tensor:
    """A row of labels, which ends with -1."""
    wide = torch.stack([labels, (labels + 1) % CLASSES], 1)
    return F.pad(wide, (0, out.shape[1] - 2), value=-1)


def _connectionist(loss: nn.Module, out: Tensor, labels: Tensor) -> Tensor:
    rows = out.shape[0]
    steps = torch.stack([out[:, :CLASSES] * (k + 1) for k in range(STEPS)]).log_softmax(-1)
    targets = torch.stack([labels % (CLASSES - 1) + 1, labels % 2 + 1], 1)
    return loss(steps, targets, torch.full((rows,), STEPS), torch.full((rows,), 2))


LOSSES: Mapping[str, Case] = {
    "L1Loss": Case(_elements),
    "NLLLoss": Case(lambda loss, out, y: loss(out.log_softmax(-1), y)),
    "PoissonNLLLoss": Case(_elements),
    "GaussianNLLLoss": Case(lambda loss, out, y: loss(out, _like(out, y), F.softplus(out.roll(1, 1)))),
    "KLDivLoss": Case(
        lambda loss, out, y: loss(out.log_softmax(-1), _like(out, y)), reductions=(*REDUCTIONS, "batchmean")
    ),
    "MSELoss": Case(_elements),
    "BCELoss": Case(lambda loss, out, y: loss(out.sigmoid(), _like(out, y))),
    "BCEWithLogitsLoss": Case(_elements),
    "HingeEmbeddingLoss": Case(lambda loss, out, y: loss(out, _sign(out, y))),
    "MultiLabelMarginLoss": Case(lambda loss, out, y: loss(out, _many(out, y))),
    "SmoothL1Loss": Case(_elements),
    "HuberLoss": Case(_elements),
    "SoftMarginLoss": Case(lambda loss, out, y: loss(out, _sign(out, y))),
    "CrossEntropyLoss": Case(lambda loss, out, y: loss(out, y)),
    "LinearCrossEntropyLoss": Case(
        lambda loss, out, y: loss(out, y), {"in_features": WIDTH, "num_classes": CLASSES, "dtype": torch.float64}
    ),
    "MultiLabelSoftMarginLoss": Case(_elements),
    "CosineEmbeddingLoss": Case(lambda loss, out, y: loss(out, out.roll(1, 1), _signs(y))),
    "MarginRankingLoss": Case(lambda loss, out, y: loss(out[:, 0], out[:, 1], _signs(y))),
    "MultiMarginLoss": Case(lambda loss, out, y: loss(out, y)),
    "TripletMarginLoss": Case(_three),
    "TripletMarginWithDistanceLoss": Case(_three),
    "CTCLoss": Case(_connectionist),
}
# With weights, ignored labels, smoothing, and labels of images.
VARIANTS: Mapping[str, tuple[str, Case]] = {
    "NLLLoss, weighted": (
        "NLLLoss",
        Case(lambda loss, out, y: loss(out.log_softmax(-1), y), {"weight": torch.linspace(0.5, 2, WIDTH).double()}),
    ),
    "NLLLoss, ignored labels": (
        "NLLLoss",
        Case(lambda loss, out, y: loss(out.log_softmax(-1), y), {"ignore_index": 1}, ("mean", "sum")),
    ),
    "NLLLoss of images": (
        "NLLLoss",
        Case(lambda loss, out, y: loss(out.reshape(-1, 3, 2).log_softmax(1), torch.stack([y % 3, y % 2], 1))),
    ),
    "CrossEntropyLoss, smoothed and weighted": (
        "CrossEntropyLoss",
        Case(
            lambda loss, out, y: loss(out, y),
            {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, WIDTH).double(), "ignore_index": 1},
        ),
    ),
    "CrossEntropyLoss of probabilities": (
        "CrossEntropyLoss",
        Case(lambda loss, out, y: loss(out, _like(out, y).softmax(-1))),
    ),
    "BCEWithLogitsLoss, weighted": (
        "BCEWithLogitsLoss",
        Case(_elements, {"pos_weight": torch.linspace(0.5, 2, WIDTH).double()}),
    ),
    "KLDivLoss of logarithms": (
        "KLDivLoss",
        Case(
            lambda loss, out, y: loss(out.log_softmax(-1), _like(out, y).log()),
            {"log_target": True},
            (*REDUCTIONS, "batchmean"),
        ),
    ),
    "PoissonNLLLoss, full": ("PoissonNLLLoss", Case(_elements, {"full": True, "log_input": True})),
    "GaussianNLLLoss, full": (
        "GaussianNLLLoss",
        Case(lambda loss, out, y: loss(out, _like(out, y), F.softplus(out[:, :1])), {"full": True}),
    ),
    "MultiMarginLoss, weighted": (
        "MultiMarginLoss",
        Case(lambda loss, out, y: loss(out, y), {"p": 2, "weight": torch.linspace(0.5, 2, WIDTH).double()}),
    ),
}


def all_cases() -> dict[str, tuple[str, Case, str]]:
    """By name: the class's name, the case and the reduction."""
    kinds = {name: (name, case) for name, case in LOSSES.items() if hasattr(of_torch, name)} | dict(VARIANTS)
    return {
        f"{name}, {reduction}": (kind, case, reduction)
        for name, (kind, case) in kinds.items()
        for reduction in case.reductions
    }


class WithLoss(nn.Module):
    """A small network, and a loss that it returns."""

    def __init__(self, kind: str, case: Case, reduction: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.loss, self.compute = getattr(nn, kind)(**case.options, reduction=reduction), case.compute

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = self.compute(self.loss, self.down(self.up(x).tanh()), labels)
        return found if found.dim() == 0 else found.square().mean()


def batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=dice, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=dice)


def difference(name: str, layout: str) -> float:
    """The largest relative difference of loss and gradients from the unsplit module.

    Raises:
        QuintNetError: where the loss is refused.
    """
    axes, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model = WithLoss(*all_cases()[name]).double()
    expected_loss, expected = reference(model, batch(), None)
    model.zero_grad(set_to_none=True)
    program = quintnet.compile(model, quintnet.Mesh(**axes), batch(), check="off", **options)
    loss = program.step(batch())
    found = {n: p.grad.full_tensor() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    gap = float((loss.detach() - expected_loss).abs()) / max(float(expected_loss.abs()), 1e-9)
    return max(gap, worst_error(found, expected)[0])


def losses_of_torch() -> set[str]:
    """The names of all losses of torch.nn, without an alias that is deprecated."""
    found = {name for name in of_torch.__all__ if inspect.isclass(getattr(of_torch, name))}
    return found - {"NLLLoss2d"}
