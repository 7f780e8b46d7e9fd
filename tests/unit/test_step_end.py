"""passes.sharding.split_step_end, checks.rewrites.step_end: what is computed when a step is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.rewrites.step_end import check_step_end
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, P
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.distributed_program import ValueSpec
from quintnet_compiler.ir.program import Axis, Program, StepEnd, outputs
from quintnet_compiler.ops.rank_local import noise
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.sharding.split_step_end import SplitStepEnd
from quintnet_compiler.strategies.rule_book import RuleBook

from .graphs import builder, leaf

Made = Callable[[GraphBuilder, fx.Node, fx.Node], fx.Node]  # a new value of rows and of the old one
SPLIT = SplitStepEnd(RuleBook(RULES))


def _sign(to: GraphBuilder, x: fx.Node, old: fx.Node) -> fx.Node:
    return to.call(aten.add.Tensor, old, to.call(aten.sign.default, to.call(aten.sum.dim_IntList, x, [0])))


def _average(to: GraphBuilder, x: fx.Node, old: fx.Node) -> fx.Node:
    return to.call(aten.add.Tensor, old, to.call(aten.sum.dim_IntList, x, [0]))


def _random(to: GraphBuilder, x: fx.Node, old: fx.Node) -> fx.Node:
    drawn = to.call(noise, [4], "normal", 0, dtype=torch.float32, device=torch.device("cpu"))
    return to.call(aten.mul.Tensor, _sign(to, x, old), drawn)


def _program(make: Made, kind: str = "buffer", reads: bool = False) -> Program:
    """Rows of 4 features, whose sum is the loss, and a buffer that a step changes. ``reads``: the loss does, too."""
    to = builder()
    x, old = leaf(to, "input", "x", 8, 4), leaf(to, kind, "bias", 4)
    new = make(to, x, old)
    loss = to.call(aten.sum.default, to.call(aten.mul.Tensor, x, new) if reads else x)
    to.output((loss, new))
    captured: Any = SimpleNamespace(changed=("bias",))
    return Program(captured, to.graph, to.mode, 8)


def _end(program: Program) -> StepEnd:
    assert program.end is not None
    return program.end


def test_what_needs_all_rows_is_computed_when_the_step_is_over() -> None:
    before = _program(_sign)
    after = SPLIT(before)
    assert after.last == ("end of step 0",) and list(after.ended) == [1]
    assert [n.target for n in _end(after).graph.nodes if n.op == "call_function"] == [
        aten.sign.default, aten.add.Tensor,
    ]  # fmt: skip
    assert outputs(after.graph)[1].target is aten.sum.dim_IntList
    assert not any(n.target is aten.sign.default for n in after.graph.nodes)
    check_step_end(before, after)
    assert SPLIT(after) is after, "once is enough"


@pytest.mark.parametrize(
    "before",
    [_program(_average), _program(_sign, reads=True), _program(_sign, "parameter")],
    ids=["linear in sums", "read by the loss", "a parameter"],
)
def test_what_stays_in_the_program(before: Program) -> None:
    assert SPLIT(before) is before and before.last == ("bias",) and list(before.ended) == []


def test_random_numbers_are_drawn_by_the_program() -> None:
    after = SPLIT(before := _program(_random))
    assert noise in {n.target for n in outputs(after.graph)} and len(_end(after).reads) == 2
    check_step_end(before, after)


def _other(program: Program, change: Callable[[fx.Graph], None]) -> Program:
    end = _end(program)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    out = graph.graph_copy(end.graph, copied)
    graph.output(out)
    change(graph)
    return replace(program, end=replace(end, graph=graph))


def _renamed(graph: fx.Graph) -> None:
    next(n for n in graph.nodes if n.target is aten.sign.default).target = aten.neg.default


def _swapped(graph: fx.Graph) -> None:
    add = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    add.args = tuple(reversed(add.args))


def _early(graph: fx.Graph) -> None:
    first = next(iter(graph.nodes))
    graph.output_node().args = ((first,),)


@pytest.mark.parametrize("change", [_renamed, _swapped, _early])
def test_another_computation_is_found(change: Callable[[fx.Graph], None]) -> None:
    before = _program(_sign)
    with pytest.raises(CompileError, match="end of a step: result 1 is another one"):
        check_step_end(before, _other(SPLIT(before), change))


def test_another_sum_is_found() -> None:
    before, after = _program(_sign), SPLIT(_program(_sign))
    total = outputs(after.graph)[1]
    total.args = (total.args[0], [1])
    with pytest.raises(CompileError, match="end of a step"):
        check_step_end(before, after)


def test_which_axes_have_terms_of_a_result() -> None:
    axes = Axis("dp", 2, "data"), Axis("mb", 2, "time"), Axis("tp", 2, "model")
    spec = ValueSpec("end of step 0", (4,), torch.float32, (P, P, I))
    assert spec.summed(axes) == ("dp",) and replace(spec, shape=()).summed(axes) == ()
