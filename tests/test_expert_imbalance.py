"""Predictions where experts get unequally many rows: ``expert_imbalance`` of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quintnet
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.ops.collectives import combine, dispatch
from quintnet_compiler.ops.experts.grouped_rows import grouped_linear, grouped_weight_grad
from quintnet_compiler.simulation.footprint import Footprints
from quintnet_compiler.simulation.piece_parts import NodeTime
from quintnet_compiler.simulation.priced import ProgramPrices, expert_loads

from .models import WIDTH, Mixture

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)


def _program(imbalance: float, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    batch = torch.randn(64, WIDTH), torch.randint(0, 8, (64,))
    return quintnet.compile(
        Mixture(), quintnet.Mesh(**axes), batch, expect={"expert_imbalance": imbalance}, overlap=False, **options
    )


def _times(program: quintnet.CompiledProgram) -> dict[str, NodeTime]:
    made = program.ranks[0].stages[0]
    prices = ProgramPrices(program._primary().program, ClusterCosts(Cluster("h100"), unknown="memory"))
    return {time.node.name: time for name in made.pieces for time in prices.node_times(made, name)}


def test_what_rows_of_experts_take_grows_with_the_busiest_rank() -> None:
    even, busy = _program(1.0, {"ep": 4}), _program(2.5, {"ep": 4})
    assert even.ranks[0].forward.code == busy.ranks[0].forward.code, "programs are the same"
    rows = expert_loads(busy._primary().program)
    of_rows, kinds = {node.name for node in rows}, {node.target for node in rows}
    assert {dispatch, combine, grouped_linear, grouped_weight_grad} <= kinds
    others = _times(even)
    for name, time in _times(busy).items():
        factor = 2.5 if name in of_rows else 1.0
        assert time.compute == pytest.approx(factor * others[name].compute)
        assert time.communication == pytest.approx(factor * others[name].communication)
    assert busy.simulate().seconds > even.simulate().seconds
    assert "the busiest rank of experts is taken to get 2.5 times its share" in busy.simulate().notes


@pytest.mark.slow
def test_rows_of_the_busiest_rank_are_in_memory() -> None:
    """Activations of dispatched rows are 2.5 times as large: the rows, the first products, and what the second gets."""
    even, busy = (Footprints(_program(factor, {"ep": 4})._primary().program) for factor in (1.0, 2.5))
    program = _program(2.5, {"ep": 4})._primary().program
    rows = {node.name for node in expert_loads(program)}
    names = program.stages[0].forward.outputs
    pairs = zip(names, even.calls[0, "forward"].outputs, busy.calls[0, "forward"].outputs, strict=True)
    grown = {name: (a.bytes, b.bytes) for name, a, b in pairs if a.bytes != b.bytes}
    assert grown and grown.keys() <= rows
    assert all(b == 2.5 * a for a, b in grown.values())
    assert busy.calls[0, "backward"].working > even.calls[0, "backward"].working


def test_where_no_rows_travel_nothing_changes() -> None:
    even, busy = _program(1.0, {"dp": 2}), _program(4.0, {"dp": 2})
    assert even.simulate().seconds == busy.simulate().seconds
    with pytest.raises(quintnet.CompileError, match="expert_imbalance") as error:
        _program(0.5, {"ep": 2})
    assert error.value.code == "QN207"


@pytest.mark.slow
def test_the_planner_assumes_it() -> None:
    batch = torch.randn(64, WIDTH), torch.randint(0, 8, (64,))
    cluster = quintnet.Cluster("h100", gpus_per_node=4)
    found = [
        quintnet.plan(Mixture(), cluster, batch, plan={"mesh": {"ep": 4}, "expect": {"expert_imbalance": factor}}).best
        for factor in (1.0, 3.0)
    ]
    assert found[1].expect.expert_imbalance == 3.0
    seconds = [quintnet.estimate(Mixture(), cluster, batch, plan=plan).seconds for plan in found]
    assert seconds[1] > seconds[0]
