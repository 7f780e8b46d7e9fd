"""NaN and Inf stop a step before the optimizer, and are traced to the operator that made them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Faulty(nn.Module):
    """Goes wrong in one way, in one row (of the last microbatch of the second data rank)."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.blocks, self.head = fault, nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor, bad: Tensor, labels: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.fault == "exp" and i == 1:
                x = x + torch.exp(x.abs() * bad * 1e6) * 0  # inf * 0
            if self.fault == "root" and i == 2:
                x = x + torch.sqrt((x * (1 - bad)).square().sum(-1, keepdim=True))  # the derivative of the root of 0
            if self.fault == "mask" and i == 0:
                scores = (x.unsqueeze(1) * 0).masked_fill(bad.unsqueeze(-1).bool(), float("-inf"))
                x = x + torch.softmax(scores, -1).sum(1)  # a row that sees nothing
        return F.cross_entropy(self.head(x), labels)


def _batch(rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    bad = torch.zeros(rows, 1)
    bad[-1] = 1
    return torch.randn(rows, 16, generator=dice), bad, torch.randint(0, 4, (rows,), generator=dice)


def _program(fault: str, mesh: quintnet.Mesh, **options: bool) -> tuple[nn.Module, quintnet.CompiledProgram]:
    torch.manual_seed(0)
    model = Faulty(fault)
    return model, quintnet.compile(model, mesh, _batch(), microbatches=2, **options)  # type: ignore[arg-type]


MESH = quintnet.Mesh(pp=2, dp=2, tp=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "value", "phase", "line"),
    [
        ("exp", "inf in %exp", "forward", "torch.exp(x.abs() * bad * 1e6)"),
        ("root", "inf in %", "backward", "torch.sqrt("),
        ("mask", "nan in %_softmax", "forward", "torch.softmax(scores, -1)"),
    ],
)
def test_the_first_bad_operator_is_named(fault: str, value: str, phase: str, line: str) -> None:
    model, program = _program(fault, MESH)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(quintnet.RunError) as caught:
        program.step(_batch())
    text = str(caught.value)
    assert caught.value.code == "QN501" and value in text and line in text
    assert f"{phase} of microbatch 1" in text and "dp=1" in text
    assert all(p.grad is None for p in program.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert program.get_rng_state()["step"] == 0  # the step did not happen


@pytest.mark.slow
def test_a_bad_batch_or_parameter_is_named_as_the_source() -> None:
    _, program = _program("none", MESH)
    batch = _batch()
    batch[0][5, 3] = float("nan")
    with pytest.raises(quintnet.RunError, match=r"(?s)QN501.*batch\[0\] held nan before"):
        program.step(batch)
    model, program = _program("none", MESH)
    with torch.no_grad():
        model.blocks[2].linear.weight[3, 3] = float("inf")  # type: ignore[index,union-attr]
    with pytest.raises(quintnet.RunError, match=r"(?s)QN501.*parameter 'blocks.2.linear.weight' held inf before"):
        program.step(_batch())


@pytest.mark.slow
def test_good_gradients_survive_a_bad_step() -> None:
    _, program = _program("none", MESH)
    program.step(_batch())
    kept = {name: p.grad.full_tensor().clone() for name, p in program.named_parameters()}  # type: ignore[union-attr]
    bad = _batch()
    bad[0][0, 0] = float("inf")
    with pytest.raises(quintnet.RunError):
        program.step(bad)
    for name, parameter in program.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), kept[name])  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_check_can_be_left_out() -> None:
    _, program = _program("mask", MESH, check_finite=False)
    assert program.step(_batch()).isnan()


def test_large_but_finite_gradients_pass() -> None:
    """Their sum overflows; they do not."""
    model = nn.Linear(64, 64, bias=False)

    def loss(out: Tensor, scale: Tensor) -> Tensor:
        return (out * scale).sum()

    batch = (torch.ones(2, 64), torch.full((2, 64), 1e37))
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=loss)
    with torch.no_grad():
        model.weight.zero_()
    program.step(batch)
    assert all(p.grad.full_tensor().isfinite().all() for p in program.parameters())  # type: ignore[union-attr]
