"""passes.lowering.fuse_token_dispatch, checks.rewrites.token_dispatch: which rows may stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.rewrites.token_dispatch import check_token_dispatch
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import LocalProgram
from quintnet_compiler.ops.collectives import combine, dispatch
from quintnet_compiler.ops.experts.grouped_rows import group_rows, ungroup_rows
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.lowering.fuse_token_dispatch import FuseTokenDispatch

from .graphs import builder, leaf

Made = Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node]  # of rows, and other rows


def _program(make: Made, together: bool = True, plan: str = "order", stage: int = 0) -> LocalProgram:
    """Rows that come back from their experts, ``make`` something of them, and leave for experts again."""
    to = builder()
    x, y = (leaf(to, "input", name, 8, 4) for name in ("x", "y"))
    plans = {n: (leaf(to, "input", n, 8, dtype=torch.int64), leaf(to, "input", f"{n}_counts", 2, 2)) for n in ORDERS}
    ends = leaf(to, "input", "ends", 2, dtype=torch.int32)
    there, again = ("ep", 2, *plans["order"]), ("ep", 2, *plans[plan])
    inner = plans["order"][0], ends
    if together:
        made = make(to, x, y)
    else:
        back = [to.call(combine, to.call(ungroup_rows, rows, *inner), *there) for rows in (x, y)]
        made = to.call(group_rows, to.call(dispatch, make(to, *back), *again), *inner)
    to.output((to.call(aten.neg.default, made),))
    stages = {node: stage for node in to.graph.nodes if node.op == "call_function"}
    staged: Any = None
    return LocalProgram(staged, to.graph, to.mode, stages, {}, frozenset(), {}, {})


ORDERS = ("order", "other")
BY_ROWS: dict[str, Made] = {
    "silu": lambda to, x, y: to.call(aten.silu.default, x),
    "gated": lambda to, x, y: to.call(aten.mul.Tensor, to.call(aten.silu.default, x), y),
    "twice": lambda to, x, y: to.call(aten.mul.Tensor, x, x),
}
TOGETHER: dict[str, Made] = {
    "a sum down the rows": lambda to, x, y: to.call(aten.cumsum.default, x, 0),
    "a softmax over rows": lambda to, x, y: to.call(aten.softmax.int, x, 0),
}


@pytest.mark.parametrize("what", BY_ROWS)
def test_rows_that_are_treated_alone_stay(what: str) -> None:
    before = _program(BY_ROWS[what], together=False)
    after = FuseTokenDispatch(RULES)(before)
    assert not any(node.target in (dispatch, combine, group_rows, ungroup_rows) for node in after.graph.nodes)
    check_token_dispatch(before, after, RULES)
    check_token_dispatch(before, _program(BY_ROWS[what]), RULES)


@pytest.mark.parametrize("what", TOGETHER)
def test_rows_that_meet_must_come_back(what: str) -> None:
    before = _program(TOGETHER[what], together=False)
    assert FuseTokenDispatch(RULES)(before) is before
    with pytest.raises(CompileError, match=r"token dispatch: \w+ is lost"):
        check_token_dispatch(before, _program(TOGETHER[what]), RULES)


def test_another_plan_is_another_order() -> None:
    before = _program(BY_ROWS["silu"], together=False, plan="other")
    assert any(node.target is dispatch for node in FuseTokenDispatch(RULES)(before).graph.nodes)
    with pytest.raises(CompileError, match="token dispatch"):
        check_token_dispatch(before, _program(BY_ROWS["silu"]), RULES)


@pytest.mark.parametrize("other", ["silu", "twice"])
def test_what_is_computed_must_be_the_same(other: str) -> None:
    with pytest.raises(CompileError, match="is lost"):
        check_token_dispatch(_program(BY_ROWS["gated"], together=False), _program(BY_ROWS[other]), RULES)


def test_nothing_may_be_added_or_move_to_another_stage() -> None:
    before = _program(BY_ROWS["silu"], together=False)
    with pytest.raises(CompileError, match="is lost"):
        check_token_dispatch(before, _program(BY_ROWS["silu"], stage=1), RULES)
    more = _program(BY_ROWS["silu"])
    silu = next(node for node in more.graph.nodes if node.target is aten.silu.default)
    with more.graph.inserting_after(silu):
        added = more.graph.call_function(aten.relu.default, (silu,))
    added.meta.update(silu.meta)
    with pytest.raises(CompileError, match=r"relu\w* was not there"):
        check_token_dispatch(before, more, RULES)
