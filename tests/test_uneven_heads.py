"""Weights of heads that do not divide over ``tp``: each rank stores its own heads alone, trains them as plain PyTorch
does, and saves them bit by bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.core.sharding import S, Shard
from quintnet_compiler.simulation.rehearsal import rehearse

from .beside_plain import train_beside
from .models import GPT
from .test_checkpoint import _require_equal

torch.set_num_threads(1)
SIZE = 4  # features of a head


class Attention(nn.Module):
    """Heads with weights of their own for queries, keys and values, behind a linear layer."""

    def __init__(self, heads: int, inner: int = 0) -> None:
        super().__init__()
        self.heads, width = heads, heads * SIZE
        inner = inner or width
        self.first = nn.Linear(width, inner, bias=False)
        self.q, self.k, self.v = (nn.Linear(inner, width) for _ in range(3))
        self.o = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (each(x).unflatten(-1, (self.heads, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.o(y.transpose(1, 2).flatten(2))).square().mean()


def _model(heads: int) -> nn.Module:
    torch.manual_seed(0)
    return Attention(heads).double()


def _batch(heads: int) -> tuple[Tensor]:
    return (torch.randn(4, 5, heads * SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def _plan() -> dict[str, Any]:
    """By heads, whatever that costs."""
    rows = {f"{name}.{kind}": {"tp": f"S(0,1,{SIZE})"} for name in "qkv" for kind in ("weight", "bias")}
    rest = {"o.weight": {"tp": f"S(1,1,{SIZE})"}, "o.bias": {"tp": "I"}, "first.weight": {"tp": "I"}}
    return {"parameters": rows | rest}


def _held(heads: int, ranks: int, rank: int) -> int:
    """How many of the heads a rank has."""
    chunks = torch.arange(heads).chunk(ranks)
    return len(chunks[rank]) if rank < len(chunks) else 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (3, 4), (10, 4)])
def test_ranks_store_their_heads_alone(heads: int, ranks: int) -> None:
    """Memory is that of as many heads as the first rank has."""
    program = quintnet.compile(_model(heads), Mesh(tp=ranks), _batch(heads), plan=_plan())
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)
    state, width, own = program._primary().program.state, heads * SIZE, _held(heads, ranks, 0) * SIZE
    assert state["q.weight"].sharding == (S(0, 1, SIZE),) and state["o.weight"].sharding == (S(1, 1, SIZE),)
    (found,) = rehearse(program._primary().program)
    expected = (4 * own * width + 3 * own + width + width * width) * 8
    assert (found.parameters, found.gradients) == (expected, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("heads", "axes", "options"),
    [
        (3, {"dp": 2, "tp": 2}, {"zero": 1}),
        (3, {"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full"}),
        (5, {"dp": 3, "tp": 2}, {"zero": 1}),
        (3, {"tp": 2}, {"microbatches": 2}),
        (3, {"cp": 2, "tp": 2}, {}),
        (3, {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}),
        (7, {"tp": 3}, {}),
    ],
    ids=str,
)
def test_other_layouts(heads: int, axes: dict[str, int], options: dict[str, Any]) -> None:
    program = quintnet.compile(_model(heads), Mesh(**axes), _batch(heads), plan=_plan(), **options)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_what_heads_are_made_of_may_be_fewer_than_a_head_has() -> None:
    """Of 4, each data rank has 2: no whole head, which says nothing of how the other dim is sliced."""
    torch.manual_seed(0)
    model = Attention(3, inner=4).double()
    program = quintnet.compile(model, Mesh(dp=2, tp=2), _batch(3), plan=_plan(), zero=3)
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


def test_a_plan_may_slice_heads_over_data_ranks() -> None:
    """In whole units: what is added up there is scattered so, too."""
    plan = {"parameters": {"q.weight": {"dp": f"S(0,1,{SIZE})"}}}
    for zero in (1, 3):
        program = quintnet.compile(_model(3), Mesh(dp=2), _batch(3), plan=plan, zero=zero)
        assert program._primary().program.state["q.weight"].sharding == (S(0, 1, SIZE),)
        report = program.verify()
        assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rows", "ranks"), [(4, 2), (1, 2), (4, 4)])
def test_no_weight_is_whole_unless_the_plan_says_so(rows: int, ranks: int) -> None:
    """Whatever splits the attention itself."""
    x = _batch(10)[0][:rows]
    for model, batch in ((_model(10), (x,)), (_model(5), (x[:, :, :20],))):
        if len(model.first.weight) // SIZE >= ranks:  # type: ignore[arg-type,union-attr]
            state = quintnet.compile(model, Mesh(tp=ranks), batch, check="off")._primary().program.state
            for name in ("q.weight", "k.weight", "v.weight", "o.weight"):
                assert isinstance(state[name].sharding[0], Shard), (name, state[name].sharding)
    gpt = GPT(vocab=32, width=20, heads=5, depth=1, length=8).double()
    ids = torch.zeros(rows, 8, dtype=torch.long)
    program = quintnet.compile(gpt, Mesh(tp=ranks), (ids, ids), check="off")
    assert isinstance(program._primary().program.state["blocks.0.qkv.weight"].sharding[0], Shard)


# -- processes


def _trained(axes: dict[str, int], options: dict[str, Any], folder: str, start: str) -> tuple[int, int]:
    """Two clipped steps of AdamW as plain PyTorch does them, saved. Returns the bytes of a rank's parameters, and of
    its moments."""
    torch.set_num_threads(1)
    heads = 3
    model, batch = _model(heads), _batch(heads)
    plain = copy.deepcopy(model)
    program = quintnet.compile(model, Mesh(**axes), batch, plan=_plan(), **options)
    ours = train_beside(program, plain, batch, 2)
    program.save(folder, step=1, optimizer=ours)
    if start:  # what another layout wrote, written again
        again = quintnet.compile(_model(heads), Mesh(**axes), batch, plan=_plan(), **options)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        again.load(start, optimizer=optimizer)
        again.save(f"{folder}-again", step=1, optimizer=optimizer)
        _operators(program, plain)
    moments = [x for state in ours.state.values() for x in state.values() if x.dim()]
    return _bytes(list(program.parameters())), _bytes(moments)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.to_local().nbytes for x in tensors if hasattr(x, "to_local"))


def _operators(program: quintnet.CompiledProgram, plain: nn.Module) -> None:
    """Of such slices torch's operators give what they give of the whole."""
    parts, wholes = dict(program.named_parameters()), dict(plain.named_parameters())
    for name in ("q.weight", "o.weight"):
        part, whole = parts[name].detach(), wholes[name].detach()
        for made in (
            lambda x: x.t(),
            lambda x: x.sum(0),
            lambda x: torch.linalg.vector_norm(x, dim=1),
            lambda x: x @ x.t(),
            lambda x: x * x.norm(),
            lambda x: x.unsqueeze(0),
            lambda x: torch.cat([x, x]),
        ):
            torch.testing.assert_close(made(part).full_tensor(), made(whole), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tp": 2}, {}),
        pytest.param({"tp": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, {"zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_processes_train_and_save_heads_that_do_not_divide(
    axes: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    """Another layout reads and writes the same bits; every rank's memory is that of its own heads."""
    _trained({"dp": 1}, {}, str(tmp_path / "whole"), "")
    whole, own, name = tmp_path / "whole", tmp_path / "own", "step-00000001"
    ranks, heads, width = torch.Size(axes.values()).numel(), 3, 3 * SIZE
    found = quintnet.launch(_trained, ranks, (axes, options, str(own), str(whole)), timeout=240)
    _require_equal(whole / name, Path(f"{own}-again") / name)
    for rank, (parameters, moments) in enumerate(found):
        if axes.keys() == {"tp"}:
            mine = _held(heads, ranks, rank) * SIZE
            assert parameters == (4 * mine * width + 3 * mine + width + width * width) * 8
            assert moments == 2 * parameters
    program = quintnet.compile(_model(heads), Mesh(dp=2, tp=3), _batch(heads), zero=3)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    program.load(own, optimizer=optimizer)
    program.save(tmp_path / "third", step=1, optimizer=optimizer)
    _require_equal(own / name, tmp_path / "third" / name)
