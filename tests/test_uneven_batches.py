"""Batches that divide neither over data ranks nor, after these, over microbatches: rows are dealt unevenly twice."""

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

from .models import GPT, MLP, reference, worst_error

torch.set_num_threads(1)
EXACT = 1e-12
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def _rows(rows: int) -> Batch:
    dice = torch.Generator().manual_seed(rows)
    labels = torch.randint(0, 8, (rows,), generator=dice)
    labels[1::3] = -100
    return torch.randn(rows, 16, dtype=torch.float64, generator=dice), labels


def _tokens(rows: int) -> Batch:
    ids = torch.randint(0, 33, (rows, 6), generator=torch.Generator().manual_seed(rows))
    labels = ids.roll(-1, 1)
    labels[0, :4] = -100
    return ids, labels


def _equal(program: Any, twin: nn.Module, batch: Batch, loss_fn: Loss | None) -> None:
    """One step gives the loss and all gradients of the module."""
    program.zero_grad()
    loss, expected = reference(copy.deepcopy(twin), batch, loss_fn)
    assert abs(program.step(batch) - loss) <= EXACT * max(1, abs(loss))
    error, worst = worst_error({n: p.grad.full_tensor() for n, p in program.named_parameters()}, expected)
    assert error < EXACT, (len(batch[0]), worst, error)


def _mean(y: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(y, labels.unsqueeze(-1).expand_as(y).to(y.dtype) / 100)


def _sum(y: Tensor, labels: Tensor) -> Tensor:
    return (y.square() + labels.unsqueeze(-1)).sum() + y.abs().mean()


def _masked_mean(y: Tensor, labels: Tensor) -> Tensor:
    """A mean over what counts, whose number depends on the batch."""
    counts = (labels >= 0).to(y.dtype)
    each = F.cross_entropy(y, labels.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum()


def _directions(y: Tensor, labels: Tensor) -> Tensor:
    """What makes 0 / 0 and 1 / 0 of zeros, in the forward and in the backward."""
    return (y / y.norm(dim=-1, keepdim=True)).square().log().mean() + y.reciprocal().mean() * 1e-3


LOSSES: dict[str, Loss] = {
    "mean": _mean, "sum": _sum, "ignored": F.cross_entropy, "masked": _masked_mean, "directions": _directions,
}  # fmt: skip


class Plain(nn.Sequential):
    """Without biases: what it makes of zeros is 0."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 12, bias=False), nn.Tanh(), nn.Linear(12, 8, bias=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"microbatches": 2}),
        ({"dp": 2, "tp": 2}, {"microbatches": 2, "zero": 1}),
        ({"dp": 2, "pp": 2}, {"microbatches": 2, "zero": 2}),
        ({"dp": 3}, {"microbatches": 2, "zero": 3}),
        ({"dp": 4}, {"microbatches": 3}),
        ({"dp": 2, "pp": 2}, {"microbatches": 3, "schedule": "zb-h1"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_number_of_rows(loss: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Plain().double()
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), _rows(12), loss_fn=LOSSES[loss], check="off", **options)
    for rows in (7, 5, 3, 1):
        if rows > 1 or loss != "ignored":
            _equal(program, twin, _rows(rows), LOSSES[loss])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2, "tp": 2}, {"microbatches": 2, "zero": 3}),
        ({"dp": 2, "cp": 2}, {"microbatches": 2}),
        ({"dp": 2, "pp": 2}, {"microbatches": 2, "zero": 1, "recompute": "full"}),
    ],
    ids=str,
)
def test_a_transformer_whose_loss_is_a_mean_over_tokens(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT(vocab=33, width=24, heads=3, depth=2, length=8).double()
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), _tokens(8), check="off", **options)
    for rows in (5, 1):
        _equal(program, twin, _tokens(rows), None)
        batch = _tokens(rows)
        assert abs(program.evaluate(batch) - twin(*batch)) < EXACT


def test_without_experts_their_axis_deals_rows_as_dp_does() -> None:
    torch.manual_seed(0)
    model = GPT(vocab=33, width=24, heads=3, depth=1, length=8).double()
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(ep=2), _tokens(8), check="off", microbatches=2)
    for rows in (5, 1):
        _equal(program, twin, _tokens(rows), None)


def test_random_numbers_are_those_of_every_layout() -> None:
    def found(axes: dict[str, int], microbatches: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 8)).double()
        program = quintnet.compile(
            model, Mesh(**axes), _rows(8), loss_fn=F.cross_entropy, microbatches=microbatches, seed=3, check="off"
        )
        return [float(program.step(_rows(rows)).detach()) for rows in (8, 5, 7, 2)]

    assert found({"dp": 2}, 2) == pytest.approx(found({}, 1), abs=EXACT)


class Coupled(nn.Module):
    """Rows that are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        y = self.linear(x)
        return F.cross_entropy(y @ y.T, torch.arange(len(y), device=y.device))


class Inverted(nn.Module):
    """Raises where a matrix is singular, as one of zeros is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16).double()

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        a = self.linear(x).reshape(-1, 4, 4)
        return torch.linalg.inv(a @ a.transpose(1, 2) + torch.eye(4, dtype=a.dtype)).mean()


def test_what_may_not_see_padding_is_refused() -> None:
    why = r"QN106 [\s\S]*7 rows[\s\S]*linalg_inv\.default may not see padding"
    with pytest.raises(quintnet.QuintNetError, match=why):
        quintnet.compile(Inverted(), Mesh(dp=2), _rows(7), microbatches=2)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}], ids=str)
def test_a_batch_without_rows_is_refused(axes: dict[str, int]) -> None:
    model = nn.Linear(16, 8).double()
    program = quintnet.compile(copy.deepcopy(model), Mesh(**axes), _rows(4), loss_fn=F.cross_entropy)
    for call in (program.step, program.evaluate):
        with pytest.raises(quintnet.InputError, match=r"QN102 [\s\S]*no rows[\s\S]*leave empty batches out"):
            call(_rows(0))
    assert torch.isfinite(program.step(_rows(5)))
    with pytest.raises(quintnet.InputError, match=r"QN102 [\s\S]*no rows"):
        quintnet.compile(model, Mesh(**axes), _rows(0), loss_fn=F.cross_entropy)


def test_what_couples_rows_is_refused() -> None:
    norm = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)).double()
    cases: list[tuple[nn.Module, Loss | None, str]] = [
        (norm, F.cross_entropy, "sum over all rows"),
        (Coupled().double(), None, "does not split the dim of the batch|other rows"),
    ]
    for model, loss_fn, why in cases:
        with pytest.raises(quintnet.CompileError, match=rf"QN104 [\s\S]*({why})[\s\S]*microbatches"):
            quintnet.compile(copy.deepcopy(model), Mesh(dp=2), _rows(7), loss_fn=loss_fn, microbatches=2)
    with pytest.raises(quintnet.InputError, match=r"QN106 [\s\S]*7 rows[\s\S]*use a batch of 4 rows"):
        quintnet.compile(
            norm, Mesh(dp=2), _rows(7), loss_fn=F.cross_entropy, microbatches=2, batch_statistics="microbatch"
        )


# -- processes, and the training loop


def _loader(rows: int, batch_size: int) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_rows(rows)), batch_size=batch_size)


def _epochs(microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    loader = _loader(21, 8)  # batches of 8, 8 and 5 rows
    program = quintnet.compile(
        MLP().double(), Mesh(dp=2), next(iter(loader)), loss_fn=F.cross_entropy, microbatches=microbatches, zero=1
    )
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    history = quintnet.Trainer(program, optimizer, loader, epochs=2, max_grad_norm=0.5, log_every=0).fit()
    return history.losses, {n: p.full_tensor() for n, p in program.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_epochs_of_the_trainer_whose_last_batch_is_smaller(microbatches: int) -> None:
    torch.manual_seed(0)
    twin, losses = MLP().double(), []
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(2):
        for x, labels in _loader(21, 8):
            loss = F.cross_entropy(twin(x), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert len(losses) == 6
    for found, parameters in quintnet.launch(_epochs, 2, (microbatches,), timeout=240):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, p in twin.named_parameters():
            torch.testing.assert_close(parameters[name], p.detach(), rtol=1e-9, atol=1e-11, msg=name)
