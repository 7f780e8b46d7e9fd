"""Balance of experts without an auxiliary loss (Wang et al. 2024): a bias that is added to the scores for the choice of
experts alone, and that each step moves by the numbers of rows that experts got."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .models import WIDTH

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
MANY, TOP, RATE = 8, 2, 0.05

COUNTS: dict[str, Any] = {
    "one_hot": lambda ids, x: F.one_hot(ids, MANY).sum(0).to(x.dtype),
    "scatter_add": lambda ids, x: x.new_zeros(MANY).scatter_add(0, ids, torch.ones_like(ids, dtype=x.dtype)),
    "index_add of integers": lambda ids, x: ids.new_zeros(MANY).index_add(0, ids, torch.ones_like(ids)).to(x.dtype),
    "bincount": lambda ids, x: torch.bincount(ids, minlength=MANY).to(x.dtype),
    "histc": lambda ids, x: torch.histc(ids.to(x.dtype), MANY, 0, MANY - 1),
}


class Balanced(nn.Module):
    """``reads``: the loss depends on how even the routing is, as an auxiliary loss does."""

    def __init__(self, counts: str = "one_hot", reads: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.router = nn.Linear(WIDTH, MANY, bias=False)
        self.up = nn.Parameter(torch.randn(MANY, 2 * WIDTH, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(MANY, WIDTH, 2 * WIDTH) * 0.2)
        self.register_buffer("bias", torch.zeros(MANY))
        self.counts, self.reads = counts, reads

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        scores = torch.sigmoid(self.router(x))
        chosen = torch.topk(scores + self.bias, TOP).indices
        weights = scores.gather(1, chosen)
        rows, ids = x.repeat_interleave(TOP, 0), chosen.flatten()
        made = quintnet.expert_linear(F.silu(quintnet.expert_linear(rows, ids, self.up)), ids, self.down)
        loss = F.cross_entropy(self.head(x + (made.view(-1, TOP, WIDTH) * weights[..., None]).sum(1)), labels)
        if self.training:
            with torch.no_grad():
                load = COUNTS[self.counts](ids, x)
                self.bias += RATE * torch.sign(load.mean() - load)
            if self.reads:
                loss = loss + (load - load.mean()).square().sum() * scores.mean()
        return loss


def _batch(seed: int = 0, rows: int = 16) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=dice)
    return x, torch.randint(0, 8, (rows,), generator=dice)


def _trained(step: Any, parameters: Any, bias: Any, steps: int = 4) -> list[tuple[float, list[float]]]:
    """The loss and the bias after each step."""
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    for number in range(steps):
        loss = step(_batch(number))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), bias().tolist()))
    return found


def _of_module(model: nn.Module) -> list[tuple[float, list[float]]]:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        return loss

    return _trained(step, model.parameters(), lambda: model.bias)


def _of_program(axes: dict[str, int], options: dict[str, Any]) -> list[tuple[float, list[float]]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Balanced().double()
    program = quintnet.compile(model, quintnet.Mesh(**axes), _batch(), **options)
    return _trained(program.step, program.parameters(), lambda: model.bias)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"microbatches": 2}),
        ({"dp": 1}, {"microbatches": 4}),
        ({"dp": 2, "ep": 2}, {"microbatches": 4, "zero": 2}),
        ({"dp": 3}, {"microbatches": 2, "experts": ["dp"]}),  # neither rows nor experts divide
        ({"tp": 2}, {"microbatches": 2}),
        ({"pp": 2}, {"microbatches": 4}),
        ({"pp": 2, "ep": 2, "tp": 2}, {"microbatches": 2}),
        ({"dp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_the_bias_moves_once_a_step_by_the_rows_of_all_microbatches(axes: Any, options: Any) -> None:
    torch.manual_seed(0)
    expected = _of_module(Balanced().double())
    for (loss, bias), (ours, mine) in zip(expected, _of_program(axes, options), strict=True):
        assert ours == pytest.approx(loss, rel=1e-12) and mine == pytest.approx(bias, abs=1e-14)
    assert len({tuple(bias) for _, bias in expected}) == 4, "it moves in every step"


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("counts", COUNTS)
def test_however_rows_are_counted(counts: str, microbatches: int) -> None:
    program = quintnet.compile(Balanced(counts).double(), quintnet.Mesh(dp=2), _batch(), microbatches=microbatches)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    assert any(one.what == "buffer" and one.name == "bias" for one in report.comparisons)


@pytest.mark.slow
def test_a_loss_that_reads_the_counts_needs_all_rows() -> None:
    with pytest.raises(quintnet.CompileError, match="needs the sum over all rows") as error:
        quintnet.compile(Balanced(reads=True).double(), quintnet.Mesh(dp=2), _batch(), microbatches=2)
    assert error.value.code == "QN104"
    assert quintnet.compile(Balanced(reads=True).double(), quintnet.Mesh(dp=2), _batch()).verify().ok


def test_dumps_and_code_say_what_is_computed_when_the_step_is_over(tmp_path: Path) -> None:
    model = Balanced().double()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), _batch(), microbatches=2)
    program.dump(tmp_path)
    (after,) = tmp_path.glob("passes/*_SplitStepEnd.txt")
    text = after.read_text().partition("at the end of a step:")[2]
    assert "aten.sign(" in text and "buffer 'bias'" in text and "one_hot" not in text
    code = (tmp_path / "ranks" / "rank000.py").read_text()
    assert "def end(" in code and "sign" in code.partition("def end(")[2]
    assert "sign" not in program.ranks[0].forward.code


@pytest.mark.slow
def test_a_program_from_the_cache_moves_the_bias(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    found = [_of_program({"dp": 2}, {"microbatches": 2, "cache": folder}) for _ in range(2)]
    assert found[0] == found[1] and any(found[0][-1][1])


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"ep": 2, "pp": 2}], ids=str)
def test_processes_have_the_same_bias(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    expected = _of_module(Balanced().double())
    for found in quintnet.launch(_of_program, 2 * axes.get("pp", 1), (axes, {"microbatches": 2}), timeout=120):
        for (loss, bias), (ours, mine) in zip(expected, found, strict=True):
            assert ours == pytest.approx(loss, rel=1e-12) and mine == pytest.approx(bias, abs=1e-14)


@pytest.mark.slow
def test_a_copy_of_the_module_learns_the_same() -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    twin = copy.deepcopy(model)
    program = quintnet.compile(model, quintnet.Mesh(ep=2), _batch(), microbatches=2)
    ours = _trained(program.step, program.parameters(), lambda: model.bias, 20)
    step = quintnet.compile(twin, quintnet.Mesh(dp=1), _batch()).step
    assert [loss for loss, _ in _trained(step, twin.parameters(), lambda: twin.bias, 20)] == pytest.approx(
        [loss for loss, _ in ours], rel=1e-10
    )
