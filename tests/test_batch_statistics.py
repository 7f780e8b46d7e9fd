"""``batch_statistics="microbatch"``: a step is that of the module called with one microbatch after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.execute import executor

from .changing_modules import CLASSES, WIDTH, AverageLoss, Codebook, Counter, ResNet, Twice, changing
from .frontier import Case, compare, on_processes, report

APART = {"microbatches": 2, "batch_statistics": "microbatch"}


class Noisy(nn.Module):
    """Draws numbers, and has a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16, momentum=None)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn(WIDTH)
        return self.b(self.drop(self.norm(self.a(x))))


class Pairs(nn.Module):
    """A loss that couples rows: features shall not be correlated (Zbontar et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.b(self.a(x).tanh())
        z = z - z.mean(0)
        return (z.t() @ z / z.shape[0] - torch.eye(16, dtype=z.dtype)).square().mean()


def _case(kind: type[nn.Module], **options: Any) -> Case:
    if kind in (Noisy, Pairs):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
        loss_fn = None if kind is Pairs else F.cross_entropy
        return Case(kind, (x, torch.arange(8) % CLASSES), loss_fn, options={**APART, **options})
    return changing(kind, options={**APART, **options})


KINDS = (Twice, Codebook, Counter, AverageLoss, ResNet, Noisy, Pairs)
AXES = ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2})


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_are_those_of_the_module_called_with_each_microbatch(
    kind: type[nn.Module], axes: dict[str, int]
) -> None:
    case = _case(kind)
    report(case, {str(axes): compare(case, axes)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "microbatches": 4},
        {"schedule": "zb-h1", "microbatches": 4},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"recompute": "full"},
        {"zero": 3},
    ],
    ids=str,
)
def test_schedules_and_options(options: dict[str, Any]) -> None:
    case = _case(ResNet, **options)
    axes = {"pp": 2} if "microbatches" in options else {"pp": 2, "dp": 2}
    report(case, {str(options): compare(case, axes)})


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_verify_proves_it(axes: dict[str, int]) -> None:
    case = _case(Noisy)
    torch.manual_seed(0)
    program = quintnet.compile(
        Noisy().double(), quintnet.Mesh(**axes), (case.batch[0].double(), case.batch[1]), loss_fn=F.cross_entropy,
        **APART,
    )  # fmt: skip
    found = program.verify()
    assert found.ok and {one.name for one in found.comparisons if one.what == "buffer"} >= {"norm.running_mean"}


@pytest.mark.slow
def test_verify_finds_microbatches_that_all_read_the_first_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    true = executor.Executor._forward

    def forward(self: executor.Executor, action: Any) -> None:
        first = dict(self.carried[action.stage])
        true(self, action)
        self.carried[action.stage] = first

    case = _case(Twice)
    torch.manual_seed(0)
    x, y = case.batch(0)
    program = quintnet.compile(
        Twice().double(), quintnet.Mesh(dp=2), (x.double(), y), loss_fn=F.cross_entropy, **APART
    )  # fmt: skip
    assert program.verify().ok
    monkeypatch.setattr(executor.Executor, "_forward", forward)
    wrong = {one.name for one in program.verify().comparisons if not one.ok}
    assert wrong == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_evaluation_is_of_the_whole_batch() -> None:
    case = _case(Pairs)
    torch.manual_seed(0)
    model, batch = Pairs().double(), (case.batch[0].double(), case.batch[1])
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, **APART)
    program.step(batch)
    with torch.no_grad():
        assert torch.allclose(program.evaluate(batch), model(*batch), atol=1e-12)


@pytest.mark.slow
def test_refusals_name_the_option() -> None:
    case = _case(Twice)
    x, y = case.batch(0)
    with pytest.raises(quintnet.CompileError, match=r'QN104[\s\S]*batch_statistics="microbatch"'):
        quintnet.compile(Twice(), quintnet.Mesh(dp=2), (x, y), loss_fn=F.cross_entropy, microbatches=2)
    with pytest.raises(quintnet.CompileError, match=r"QN201[\s\S]*depend on the layout"):
        quintnet.plan(Twice(), quintnet.Cluster("h100"), (x, y), loss_fn=F.cross_entropy, plan=quintnet.Plan(**APART))


def test_a_buffer_that_one_stage_reads_and_another_changes() -> None:
    """Where a plan cuts between the two uses of a BatchNorm, stages do as the compiler finds possible."""
    case = _case(Twice)
    torch.manual_seed(0)
    x, y = case.batch(0)
    program = quintnet.compile(
        Twice().double(), quintnet.Mesh(pp=2), (x.double(), y), loss_fn=F.cross_entropy, stages=["linear"], **APART
    )
    assert program.plan.stages == ("out",) or program.verify().ok


class _Sync(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, 16), nn.SyncBatchNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def sync_norms() -> dict[str, Case]:
    """Run by each process."""
    return {"sync": Case(_Sync, (torch.ones(8, WIDTH).tril(), torch.arange(8) % CLASSES), F.cross_entropy)}


def processes() -> dict[str, Case]:
    """Run by each process."""
    return {kind.__name__: _case(kind) for kind in (Twice, Counter, Noisy)}


@pytest.mark.slow
def test_processes() -> None:
    for name, found in on_processes(processes).items():
        assert {one.kind for one in found.values()} == {"equal"}, (name, found)


@pytest.mark.slow
def test_synchronised_and_cumulative_norms() -> None:
    """Of all rows, as the module has them."""
    case = sync_norms()["sync"]
    report(case, {"dp2": compare(case, {"dp": 2})})
    noisy = _case(Noisy, microbatches=1, batch_statistics="batch")
    report(noisy, {"dp2 x tp2": compare(noisy, {"dp": 2, "tp": 2})})
