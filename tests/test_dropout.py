"""Dropout draws the same masks on every layout: the loss curves of all layouts are one curve."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .frontier import Case, compare, report

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
ROWS, LENGTH, VOCABULARY, WIDTH = 8, 8, 32, 32
LAYOUTS = [
    (quintnet.Mesh(dp=4), 1),
    (quintnet.Mesh(tp=4), 1),
    (quintnet.Mesh(pp=4), 4),
    (quintnet.Mesh(dp=2, tp=2, pp=2), 2),
]


class Block(nn.Module):
    """Dropout on attention weights and on both residual branches."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.ln1, self.ln2, self.drop = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        x = x + self.drop(self.attention(h, h, h, need_weights=False)[0])
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Dropped().to(dtype)


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    shape = (ROWS, LENGTH)
    return [tuple(torch.randint(0, VOCABULARY, shape, generator=dice) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def _train(program: quintnet.CompiledProgram, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    program.prepare(batches[0])
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        losses.append(float(program.step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@functools.cache
def _curve(dtype: torch.dtype) -> list[float]:
    return _train(quintnet.compile(_model(dtype), quintnet.Mesh(dp=1), seed=3), _batches(20))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-9), pytest.param(torch.float32, 1e-4, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("mesh", "microbatches"), LAYOUTS, ids=str)
def test_one_loss_curve_on_every_layout(
    mesh: quintnet.Mesh, microbatches: int, dtype: torch.dtype, limit: float, recompute: str
) -> None:
    program = quintnet.compile(_model(dtype), mesh, microbatches=microbatches, seed=3, recompute=recompute)
    for found, expected in zip(_train(program, _batches(20)), _curve(dtype), strict=True):
        assert abs(found - expected) / expected < limit


@pytest.mark.slow
def test_masks_are_those_of_the_module_itself_under_the_same_numbers() -> None:
    """The unsplit reference is torch's own module, whose dropout draws our numbers; also with recompute."""
    for recompute in ("none", "full"):
        program = quintnet.compile(
            _model(torch.float64), LAYOUTS[3][0], _batches(1)[0], microbatches=2, recompute=recompute
        )
        report = program.verify()
        assert report.ok, str(report)


@pytest.mark.slow
def test_recompute_saves_no_values_inside_blocks() -> None:
    kept = {}
    for recompute in ("none", "full"):
        program = quintnet.compile(_model(torch.float64), quintnet.Mesh(pp=2), _batches(1)[0], recompute=recompute)
        kept[recompute] = len(program.ranks[1].stages[0].saved)
    assert kept["full"] < kept["none"] / 3


@pytest.mark.slow
def test_masks_differ_between_steps_and_seeds_and_stop_in_evaluation() -> None:
    batch = _batches(1)[0]
    one = quintnet.compile(_model(torch.float64), quintnet.Mesh(tp=2), batch, seed=0)
    two = quintnet.compile(_model(torch.float64), quintnet.Mesh(tp=2), batch, seed=1)
    first, second, other = float(one.step(batch)), float(one.step(batch)), float(two.step(batch))
    assert len({first, second, other}) == 3
    assert float(one.evaluate(batch)) == float(one.evaluate(batch))
    model = _model(torch.float64).eval()
    assert abs(float(one.evaluate(batch)) - float(model(*batch).detach())) < 1e-12


@pytest.mark.slow
def test_the_state_is_two_numbers_and_any_layout_continues_from_it() -> None:
    batches = _batches(4)
    program = quintnet.compile(_model(torch.float64), LAYOUTS[0][0], seed=3)
    losses = [float(program.step(batch)) for batch in batches[:2]]
    state = program.get_rng_state()
    assert state == {"seed": 3, "step": 2}
    expected = [float(program.step(batch)) for batch in batches[2:]]
    other = quintnet.compile(_model(torch.float64), LAYOUTS[1][0], seed=99)
    other.set_rng_state(state)
    found = [float(other.step(batch)) for batch in batches[2:]]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-12
    assert losses != expected


def test_initial_values_are_the_same_on_every_layout() -> None:
    inits = {"*": quintnet.Normal(0.02), "*.bias": quintnet.Constant(0.0), "head.*": quintnet.Uniform(-0.1, 0.1)}
    found = []
    for mesh in (quintnet.Mesh(dp=1), LAYOUTS[3][0]):
        model = _model(torch.float64)
        program = quintnet.compile(model, mesh, _batches(1)[0])
        program.initialize(inits)
        found.append({n: p.full_tensor().clone() for n, p in program.named_parameters()})  # type: ignore[attr-defined]
    first, second = found
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert abs(float(first["blocks.0.up.weight"].std()) - 0.02) < 1e-3 and not first["blocks.0.up.bias"].any()
    assert not torch.equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"])
    assert float(first["head.weight"].abs().max()) <= 0.1
    with pytest.raises(quintnet.CompileError, match="QN204"):
        program.initialize({"nothing.*": quintnet.Constant(0.0)})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.sample(1)
def test_dropout_between_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = kind(4, 4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)[0].square().mean()  # type: ignore[no-any-return]

    x = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = Case(Recurrent, (x,), evaluates=True)
    report(case, {"dp2": compare(case, {"dp": 2})})
