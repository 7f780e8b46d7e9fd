"""strategies.hot_experts, passes.lowering.lower_experts, ir.expectations: what is hot, and what then runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import S
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.expectations import Expectations, ExpertLoad
from quintnet_compiler.ir.program import Axis, Strategy
from quintnet_compiler.ops.collectives import combine, convert, dispatch, dispatch_plan
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.experts.grouped_rows import group_plan, grouped_linear
from quintnet_compiler.ops.rank_local import local_experts, pick_experts
from quintnet_compiler.passes.lowering.lower_experts import LowerExperts
from quintnet_compiler.strategies.hot_experts import check_hot_experts, expert_loads, hot_experts

from .graphs import builder, leaf

EP = Axis("ep", 2, "data")
OVER_EP = Strategy((S(0), S(0), S(0)), (S(0),), "split r+e 1")


def _mixture(to: GraphBuilder, name: str, experts: int = 4) -> tuple[fx.Node, fx.Node]:
    """Two layers of the same rows' experts, whose second weight is computed of a parameter."""
    x, ids = leaf(to, "input", f"{name}_x", 8, 6), leaf(to, "input", f"{name}_ids", 8, dtype=torch.int64)
    up, down = (leaf(to, "parameter", f"{name}_{one}", experts, 6, 6) for one in ("up", "down"))
    first = to.call(expert_linear, x, ids, up, None, False)
    last = to.call(expert_linear, first, ids, to.call(aten.neg.default, down), None, False)
    return first, last


def test_layers_of_the_same_ids_have_the_same_hot_experts() -> None:
    to = builder()
    a, b = _mixture(to, "a"), _mixture(to, "b", experts=8)
    assert hot_experts(to.graph, {}) == {}
    assert hot_experts(to.graph, {"a_down": [2]}) == dict.fromkeys(a, (2,))
    assert hot_experts(to.graph, {"*": [0], "b_*": [7, 1]}) == {**dict.fromkeys(a, (0,)), **dict.fromkeys(b, (7, 1))}
    loads = expert_loads(to.graph, {"b_up": [7, 1]}, Expectations(expert_imbalance=1.5))
    assert loads == {**dict.fromkeys(a, ExpertLoad(1.5, 1.5)), **dict.fromkeys(b, ExpertLoad(1.5, 1.25))}
    assert expert_loads(to.graph, {}, Expectations(hot_rows=0.5)) == {}, "no rows stay where nothing is hot"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"c_*": [0]}, "QN204"),
        ({"a_up": [4]}, "QN203"),
        ({"a_up": [0], "a_down": [1]}, "QN203"),
        ({"*": [1, 1]}, "QN203"),
    ],
)
def test_what_a_plan_cannot_ask(asked: dict[str, list[int]], code: str) -> None:
    to = builder()
    _mixture(to, "a")
    with pytest.raises(CompileError) as error:
        check_hot_experts(to.graph, asked)
    assert error.value.code == code


@pytest.mark.parametrize("hot", [(), (3, 0)])
def test_hot_experts_are_behind_a_ranks_own(hot: tuple[int, ...]) -> None:
    whole, to = builder(), builder()
    node = _mixture(whole, "a")[0]
    sharded: Any = SimpleNamespace(axes=(EP,), strategies={node: (OVER_EP,)})
    lower = LowerExperts(to, sharded, {node: hot})
    x, ids = leaf(to, "input", "x", 4, 6), leaf(to, "input", "ids", 4, dtype=torch.int64)
    given = x, ids, leaf(to, "parameter", "up", 2, 6, 6)
    made = lower(node, 0, *given, None, False)
    assert lower(node, 0, *given, None, False).args[1:] == made.args[1:], "plans are shared"
    calls = {n.target: n for n in to.graph.nodes if n.op == "call_function"}
    assert made.target is combine and dispatch in calls
    assert calls[dispatch_plan].args[5] == list(hot) and calls[local_experts].args[4] == list(hot)
    assert calls[group_plan].args[1] == 2 + len(hot)
    weight = calls[grouped_linear].args[2]
    if not hot:
        assert weight is given[2] and pick_experts not in calls and convert not in calls
        return
    assert weight is calls[aten.cat.default] and weight.args[0] == [given[2], calls[convert]]
    assert calls[convert].args == (calls[pick_experts], "ep", 2, "P", "R")
    assert calls[pick_experts].args == (given[2], [3, 0], 2, ["ep"], [2])
