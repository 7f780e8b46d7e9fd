"""Rows that all tensor ranks have travel to their experts as slices of their features, where that is cheaper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import quintnet
from quintnet import Mesh, expert_linear
from quintnet_compiler.checks.strategies import Reading
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import num_bytes, shape, values
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import P, R, S
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ir.program import LocalProgram, Strategy
from quintnet_compiler.ops.collectives import STARTS, all_gather, combine, convert, dispatch, reduce_scatter
from quintnet_compiler.ops.experts.expert_linear import expert_linear as layer
from quintnet_compiler.ops.experts.grouped_rows import group_rows
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.passes.sharding.axis_view import AxisView
from quintnet_compiler.strategies.rule_book import RuleBook

from .models import EXPERTS, WIDTH, Mixture
from .zoo import ZOO, InDouble

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
ROWS = 12


def _batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH, dtype=torch.float64), torch.randint(0, 8, (rows,))


def _model(skew: float = 0.0, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Mixture(skew, bias).double()


@contextmanager
def slow_links() -> Iterator[None]:
    """The links that rows cross are far slower than those between tensor ranks, and messages start for nothing."""

    def seconds(self: Roofline, name: str, size: float, ranks: int, apart: int = 1) -> float:
        return self.collective_seconds(name, size, ranks) * (1e4 if apart > 1 else 1.0)

    with mock.patch.object(Roofline, "meeting_seconds", seconds):
        yield


@contextmanager
def only(wanted: Callable[[fx.Node, Strategy], bool]) -> Iterator[None]:
    """Layers of experts run, over tp, as is wanted."""
    legal = AxisView.legal

    def some(self: AxisView, node: fx.Node, cuts: Any) -> tuple[Strategy, ...]:
        found = legal(self, node, cuts)
        return tuple(s for s in found if wanted(node, s)) if self.travels(node) else found

    with mock.patch.object(AxisView, "legal", some):
        yield


def _local(program: quintnet.CompiledProgram) -> LocalProgram:
    return program._primary().program.source.local


def _chosen(program: quintnet.CompiledProgram, axis: str = "tp") -> list[Strategy]:
    """What layers of experts do over an axis."""
    sharded = _local(program).staged.sharded
    at = [one.name for one in sharded.axes].index(axis)
    return [chosen[at] for node, chosen in sharded.strategies.items() if node.target is layer]


# -- what is computed

# the factor that is split, whether rows travel in slices, and whether results do
WAYS = [("o", True, False), ("i", False, True)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("skew", [0.0, 10.0])
@pytest.mark.parametrize(("up", "down"), product(range(len(WAYS)), repeat=2))
def test_every_way_is_exact(up: int, down: int, skew: float) -> None:
    """Whether the product needs whole rows, or makes terms; what is between two layers goes back and leaves again."""
    ways = {2 * WIDTH: WAYS[up], WIDTH: WAYS[down]}  # by how many features a layer makes

    def wanted(node: fx.Node, strategy: Strategy) -> bool:
        factor, arriving, leaving = ways[shape(node)[1]]
        if strategy.inside is None or strategy.factor[0] != factor:
            return False
        return (strategy.inputs[0] != strategy.inside[0], strategy.outputs[0] != strategy.inside[1]) == (
            arriving,
            leaving,
        )

    with only(wanted):
        program = quintnet.compile(_model(skew), Mesh(ep=2, tp=2), _batch())
    assert all(one.inside for one in _chosen(program))
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("skew", [0.0, 10.0])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"ep": 2, "tp": 2}, {"microbatches": 2}),
        ({"ep": 2, "tp": 4}, {"sequence_parallel": False}),
        ({"ep": 3, "tp": 2}, {"recompute": "full", "microbatches": 2}),  # 2, 2 and no experts
        ({"dp": 2, "ep": 2, "tp": 2}, {"experts": ["dp", "ep"], "zero": 1}),
        ({"ep": 2, "tp": 2, "pp": 2}, {"microbatches": 3}),
        ({"ep": 2, "tp": 2}, {"sequence_parallel": False, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_slices_that_prices_choose_are_exact(axes: dict[str, int], options: dict[str, Any], skew: float) -> None:
    with slow_links():
        program = quintnet.compile(_model(skew), Mesh(**axes), _batch(), **options)
    assert all(isinstance(one.inside, tuple) for one in _chosen(program))
    report = program.verify()
    assert report.ok and report.worst.error < 1e-12, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"ep": 2, "tp": 2}, {}),
        ({"ep": 2, "tp": 2}, {"sequence_parallel": False, "microbatches": 2}),
        ({"ep": 2, "cp": 2, "tp": 2}, {"context": "ring"}),
        ({"ep": 2, "tp": 2, "pp": 2}, {"microbatches": 2, "zero": 1, "zero_axes": ("ep",)}),
    ],
    ids=str,
)
def test_a_model_of_transformers(axes: dict[str, int], options: dict[str, Any]) -> None:
    entry = ZOO["Mixtral"]
    with InDouble():
        with slow_links():
            program = quintnet.compile(entry.build(), Mesh(**axes), entry.batch(8), **options)
        assert all(one.inside for one in _chosen(program))
        assert program.verify().ok


def _process() -> tuple[float, Tensor, Tensor]:
    torch.set_num_threads(1)
    with slow_links():
        program = quintnet.compile(_model(5.0), Mesh(ep=2, tp=2), _batch(), microbatches=2)
    assert all(one.inside for one in _chosen(program))
    loss = program.step(_batch()).item()
    gradients = {name: p.grad.full_tensor() for name, p in program.named_parameters()}  # type: ignore[union-attr]
    return loss, gradients["up"], gradients["router.weight"]


@pytest.mark.slow
def test_processes_exchange_slices() -> None:
    model, batch = _model(5.0), _batch()
    loss = model(*batch)
    loss.backward()
    up, router = model.up.grad, model.router.weight.grad
    for found in quintnet.launch(_process, 4, (), timeout=120):
        assert found[0] == pytest.approx(loss.item(), rel=1e-12)
        assert torch.allclose(found[1], up, atol=1e-13) and torch.allclose(found[2], router, atol=1e-13)


# -- what moves


def _given(program: quintnet.CompiledProgram, rows: int, width: int) -> Counter[str]:
    """Bytes of rows of experts that a rank gives to collectives."""
    begun = {start: op for op, start in STARTS.items()}
    told: Counter[str] = Counter()
    for node in program._primary().program.source.graph.nodes:
        target = begun.get(node.target, node.target)
        if target in (dispatch, combine) and len(shape(node)) == 2:
            told["over ep"] += num_bytes(values(node.args[0])[0])
        elif target is all_gather and shape(node) == (rows, width):
            told["gathered over tp"] += num_bytes(values(node.args[0])[0])
        elif target is reduce_scatter and shape(node.args[0]) == (rows, width):
            told["scattered over tp"] += num_bytes(values(node.args[0])[0])
    return told


class Rows(nn.Module):
    """Rows that choose one of four experts each. What is beside them has other shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) / width**0.5)
        self.first = nn.Linear(width, width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, ids = self.first(x).flatten(0, 1), ids.flatten()
        made = expert_linear(F.silu(expert_linear(rows, ids, self.up)), ids, self.down)
        return (x + made.view(x.shape)).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_sends_its_slice_once_each_way(tp: int) -> None:
    """Of n rows of h floats on a rank, forward and backward: n h / tp go to their experts and as much comes back;
    behind the slow links they are gathered (and again, for the gradient of weights), and terms are scattered."""
    batch, n, h = (torch.randn(4, 8, WIDTH), torch.randint(0, EXPERTS, (4, 8))), 16, WIDTH
    whole = quintnet.compile(Rows(h), Mesh(ep=2, tp=tp), batch, sequence_parallel=False)
    with slow_links():
        sliced = quintnet.compile(Rows(h), Mesh(ep=2, tp=tp), batch, sequence_parallel=False)
    assert _given(whole, n, h)["over ep"] == 4 * (n * h * 4)
    found = _given(sliced, n, h)
    assert found["over ep"] == 4 * (n * h * 4) / tp
    assert found["gathered over tp"] >= 3 * (n * h * 4) / tp and found["scattered over tp"] == 2 * (n * h * 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "rows", "options", "sliced"),
    [
        ({"ep": 4, "tp": 4}, 4096, {}, True),
        ({"ep": 4, "tp": 4}, 8, {}, False),  # starting a message takes longer than sending it
        ({"ep": 2, "tp": 4}, 4096, {}, False),  # within a node of eight all links are as fast
        ({"ep": 2, "cp": 2, "tp": 4}, 4096, {}, True),  # neighbours along ep are in two nodes
        ({"ep": 4, "tp": 4}, 1024, {}, False),
        (
            {"ep": 4, "tp": 4},
            1024,
            {"expect": {"expert_imbalance": 2.0}},
            True,
        ),  # the busiest rank has as many as of 2048
        (
            {"ep": 4, "tp": 4},
            1024,
            {"expect": {"expert_imbalance": 2.0, "hot_rows": 0.9}, "hot_experts": {"up": [0]}},
            False,
        ),
    ],
    ids=str,
)
def test_prices_decide(axes: dict[str, int], rows: int, options: dict[str, Any], sliced: bool) -> None:
    batch = torch.randn(8, rows // 2, 512), torch.randint(0, EXPERTS, (8, rows // 2))
    found = _chosen(quintnet.compile(Rows(512), Mesh(**axes), batch, **options))
    assert [one.inside is not None for one in found] == [sliced, sliced]


# -- what is refused


def _strategies() -> tuple[fx.Node, Strategy, Strategy]:
    """A layer of experts, and how it runs over ep and over tp."""
    with slow_links():
        program = quintnet.compile(_model(), Mesh(ep=2, tp=2), _batch())
    sharded = _local(program).staged.sharded
    node = next(node for node in sharded.strategies if node.target is layer)
    over_ep, over_tp = sharded.strategies[node]
    return node, over_ep, over_tp


def test_types_that_rows_cannot_travel_in() -> None:
    node, over_ep, over_tp = _strategies()
    rule = RuleBook(RULES).factors_of(node)
    assert over_tp.inside is not None and over_tp.inside[0] is R

    def why(over_tp: Strategy, *before: Strategy) -> str:
        reading = Reading(node, rule)
        return [reading.apply_strategy(one, 2)[0] for one in (*before, over_tp)][-1]

    _, *others = over_tp.inputs
    assert not why(over_tp, over_ep)
    assert why(over_tp) == "its rows do not travel"
    assert why(replace(over_tp, inputs=(S(0), *others)), over_ep) == "R does not travel as S(0)"
    assert why(replace(over_tp, inputs=(S(1, 2), *others)), over_ep) == "R does not travel as S(1,2)"
    assert why(replace(over_tp, inside=(P, over_tp.inside[1])), over_ep) == "P does not travel as S(1)"
    by_experts = Strategy((S(1), *others[:1], S(0), S(0)), (P,), "split ei 1", inside=(R, P))
    assert why(by_experts, over_ep) == "each rank orders rows by experts of its own"
    assert why(replace(over_tp, inside=(S(1), over_tp.inside[1])), over_ep) == "i, o do not belong together"


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", ["other types", "left out", "over another axis", "twice"])
def test_moves_that_types_do_not_ask_for(change: str) -> None:
    with slow_links():
        program = quintnet.compile(_model(), Mesh(ep=2, tp=2), _batch())
    local = InsertCommunication(RULES)(_local(program).staged)
    check_types(local, RuleBook(RULES))
    moved = [node for node in local.graph.nodes if node.target is convert]
    found = next(node for node in moved if node.all_input_nodes[0].target is group_rows)
    rows, axis, size, before, after = found.args
    if change == "other types":
        found.args = rows, axis, size, before, "I"
    elif change == "left out":
        found.replace_all_uses_with(found.all_input_nodes[0])
    elif change == "over another axis":
        found.args = rows, "ep", size, before, after
    else:
        with local.graph.inserting_after(found):
            again = local.graph.call_function(convert, (found, axis, size, "R", "I"))
        again.meta.update(found.meta)
        found.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    with pytest.raises(CompileError, match="type check") as error:
        check_types(local, RuleBook(RULES))
    assert error.value.code == "QN209"
