"""passes.lowering.sum_in_place, checks.rewrites.in_place: what an all-reduce may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.rewrites.in_place import check_in_place
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import DifferentiatedProgram
from quintnet_compiler.ops.collectives import STARTS, all_reduce, all_reduce_, shard_slice, wait
from quintnet_compiler.passes.lowering.sum_in_place import SumInPlace

from .graphs import builder, leaf

Made = tuple[fx.Node, ...]  # the term of the sum, then what is returned beside the sum


def _program(make: Callable[[GraphBuilder, fx.Node, fx.Node], Made], op: Any = all_reduce) -> DifferentiatedProgram:
    to = builder()
    x, w = leaf(to, "input", "x", 8, 6), leaf(to, "parameter", "w", 6, 4)
    term, *others = make(to, x, w)
    found = to.call(op, term, "tp", 2)
    if op in STARTS.values():
        found = to.call(wait, found)
    to.output((found, *others))
    stage = {node: 0 for node in to.graph.nodes if node.op == "call_function"}
    local: Any = None
    return DifferentiatedProgram(local, to.graph, (found,), stage, frozenset(), {}, {}, {})


def _product(to: GraphBuilder, x: fx.Node, w: fx.Node) -> fx.Node:
    return to.call(aten.mm.default, x, w)


def _reshaped(to: GraphBuilder, x: fx.Node, w: fx.Node) -> Made:
    return (to.reshape(_product(to, x, w), [2, 4, 4]),)


def _added(to: GraphBuilder, x: fx.Node, w: fx.Node) -> Made:
    y, z = _product(to, x, w), to.call(aten.relu.default, _product(to, x, w))
    return (to.call(aten.add.Tensor, y, z),)


FREE: dict[str, Callable[..., Made]] = {
    "a product": lambda to, x, w: (_product(to, x, w),),
    "a view of one": _reshaped,
    "a sum of two": _added,
}


def _kept(to: GraphBuilder, x: fx.Node, w: fx.Node) -> Made:
    y = _product(to, x, w)
    return y, to.call(aten.relu.default, y)


def _kept_under_another_name(to: GraphBuilder, x: fx.Node, w: fx.Node) -> Made:
    y = _product(to, x, w)
    return to.reshape(y, [2, 4, 4]), to.call(aten.t.default, y)


def _slice_of_what_is_kept(to: GraphBuilder, x: fx.Node, w: fx.Node) -> Made:
    y = _product(to, x, w)
    return to.call(shard_slice, y, "tp", 2, 0, 1), to.call(aten.relu.default, y)


TAKEN: dict[str, Callable[..., Made]] = {
    "a parameter": lambda to, x, w: (w,),
    "a view of a parameter": lambda to, x, w: (to.call(aten.t.default, w),),
    "a slice of a parameter": lambda to, x, w: (to.call(shard_slice, w, "tp", 2, 0, 1),),
    "what is read again": _kept,
    "what is returned under another name": _kept_under_another_name,
    "a slice of what is read again": _slice_of_what_is_kept,
}


@pytest.mark.parametrize("op", [all_reduce, STARTS[all_reduce]], ids=["whole", "started"])
@pytest.mark.parametrize("what", FREE)
def test_what_nobody_else_has_is_overwritten(what: str, op: Any) -> None:
    before = _program(FREE[what], op)
    after = SumInPlace()(before)
    wanted = {all_reduce: all_reduce_, STARTS[all_reduce]: STARTS[all_reduce_]}[op]
    assert [n.target for n in after.graph.nodes if n.target in (op, wanted)] == [wanted]
    check_in_place(after)


@pytest.mark.parametrize("what", TAKEN)
def test_what_somebody_has_is_not(what: str) -> None:
    before = _program(TAKEN[what])
    assert SumInPlace()(before) is before
    check_in_place(before)
    with pytest.raises(CompileError, match="in-place check") as found:
        check_in_place(_program(TAKEN[what], all_reduce_))
    assert found.value.code == "QN209"


def test_of_another_function() -> None:
    """What another stage made may still be on its way here, or from there."""
    before = _program(FREE["a product"])
    (product,) = (n for n in before.graph.nodes if n.target is torch.ops.aten.mm.default)
    apart = replace(before, stage={**before.stage, product: 1})
    assert SumInPlace()(apart) is apart
    wrong = SumInPlace()(before)
    (product,) = (n for n in wrong.graph.nodes if n.target is torch.ops.aten.mm.default)
    with pytest.raises(CompileError, match="of another function"):
        check_in_place(replace(wrong, stage={**wrong.stage, product: 1}))
