"""features.hot_experts, strategies.expert_copies, passes.lowering.lower_experts: what is hot, and what then runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.derivatives.calls import Pattern
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.core.sharding import S
from quintnet_compiler.features.hot_experts import rank_methods
from quintnet_compiler.features.hot_experts.check import gradient_of_part, is_part_of_copies
from quintnet_compiler.features.hot_experts.choice import HotExperts
from quintnet_compiler.features.hot_experts.choice import hot_experts as choose_hot_experts
from quintnet_compiler.features.hot_experts.copies import HotExpertCopies
from quintnet_compiler.features.hot_experts.feature import HOT_EXPERTS
from quintnet_compiler.features.hot_experts.layers import check_hot_experts, hot_experts
from quintnet_compiler.features.hot_experts.ops import pick_experts, place_experts
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.expectations import Expectations, ExpertLoad
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import Axis, Strategy
from quintnet_compiler.ops.collectives import combine, convert, dispatch, dispatch_plan
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.experts.grouped_rows import group_plan, grouped_linear
from quintnet_compiler.ops.rank_local import local_experts
from quintnet_compiler.passes.lowering.lower_experts import LowerExperts
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.strategies.expert_copies import expert_loads

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
    loads = expert_loads(to.graph, HotExpertCopies({"b_up": [7, 1]}), Expectations(expert_imbalance=1.5))
    assert loads == {**dict.fromkeys(a, ExpertLoad(1.5, 1.5)), **dict.fromkeys(b, ExpertLoad(1.5, 1.25))}
    assert expert_loads(to.graph, None, Expectations(hot_rows=0.5)) == {}, "no rows stay where nothing is hot"


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
    sharded: Any = SimpleNamespace(
        axes=(EP,), strategies={node: (OVER_EP,)}, program=SimpleNamespace(graph=whole.graph)
    )
    lower = LowerExperts(to, sharded, HotExpertCopies({"a_up": hot}))
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_a_part_of_the_copies_and_the_transpose_returns_it(rank: int) -> None:
    """Ranks have two experts each; 3 is the second of rank 1, and 0 the first of rank 0."""
    comm = Comm(mock.Mock(), Mesh(ep=2), {"ep": rank})
    layout = [3, 0], 2, ["ep"], [2], 0
    x, grad = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [7.0]])
    assert rank_methods.pick_experts(comm, x, *layout).tolist() == ([[0.0], [1.0]] if rank == 0 else [[2.0], [0.0]])
    assert rank_methods.place_experts(comm, grad, *layout).tolist() == ([[7.0], [0.0]] if rank == 0 else [[0.0], [5.0]])


def test_the_check_knows_a_part_of_copies_and_its_gradient() -> None:
    to = builder()
    stored, tangent = leaf(to, "parameter", "up", 2, 6, 6), leaf(to, "input", "t", 2, 6, 6)
    part = HotExpertCopies({}).emit_part(to, stored, [3, 0], [EP])
    assert is_part_of_copies(part, stored, [3, 0], [EP])
    assert not is_part_of_copies(part, stored, [0, 3], [EP]) and not is_part_of_copies(stored, stored, [3, 0], [EP])
    pattern = Pattern((stored,), (tangent,), (part,), (None,))
    assert gradient_of_part(part.args, pattern) == {0: (place_experts, (tangent, *part.args[1:]))}


def test_a_plan_without_hot_experts_asks_for_no_copies() -> None:
    assert HOT_EXPERTS.expert_copies(Plan()) is None and HOT_EXPERTS.parameter_patterns(Plan()) == ()
    plan = Plan(hot_experts={"a_up": (2,)})
    copies = HOT_EXPERTS.expert_copies(plan)
    assert copies == HotExpertCopies({"a_up": (2,)}) and HOT_EXPERTS.parameter_patterns(plan) == ("a_up",)
    to = builder()
    assert copies is not None and copies.experts(to.graph) == {}
    assert choose_hot_experts([90, 2, 4, 4], 2, row_bytes=128, expert_bytes=4096) == HotExperts((0,), 0.9, 1.06)
