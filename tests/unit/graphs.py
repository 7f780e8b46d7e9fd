"""Small graphs, written by hand, and prices for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from quintnet_compiler.compat.torch import FakeTensorMode
from quintnet_compiler.core.annotations import Leaf
from quintnet_compiler.core.sharding import P, R, S
from quintnet_compiler.ir.batch_form import BatchForm
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.ir.program import Axis, Captured, DifferentiatedProgram, Program, ShardedProgram, Strategy
from quintnet_compiler.ir.result_form import ResultForm
from quintnet_compiler.ops.rules.notation import Factors
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.differentiate import Differentiate
from quintnet_compiler.passes.lowering.insert_communication import InsertCommunication
from quintnet_compiler.passes.sharding.axis_view import AxisView, ShardingOptions
from quintnet_compiler.passes.stages.follow_stages import FollowStages
from quintnet_compiler.schedules.synthesis import StageTimes
from quintnet_compiler.strategies.rule_book import RuleBook

TP, DP, TIME, CP = (
    Axis("tp", 2, "model"), Axis("dp", 2, "data"), Axis("microbatch", 2, "time"), Axis("cp", 2, "context"),
)  # fmt: skip


def builder() -> GraphBuilder:
    return GraphBuilder(FakeTensorMode(allow_non_fake_inputs=True))


def leaf(to: GraphBuilder, kind: Any, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    """A placeholder. Parameters train, inputs have the batch as dim 0."""
    with to.mode:
        value = torch.empty(shape, dtype=dtype)
    trains = kind == "parameter"
    return to.placeholder(name, value, Leaf(kind, name, trains, batched=kind == "input"), needs_grad=trains)


def program(to: GraphBuilder, *outputs: fx.Node, rows: int = 8) -> Program:
    """The graph, ended, as a program that was never captured."""
    to.output(outputs)
    nothing = pytree.tree_structure(())
    return Program(
        Captured(to.graph, {}, {}, BatchForm(nothing, ()), ResultForm(nothing, ()), training=True),
        to.graph,
        to.mode,
        rows,
    )


def linear(rows: int = 8, features: int = 6, results: int = 4) -> tuple[Program, dict[str, fx.Node]]:
    """``sum(linear(x, w))``: the program, and its nodes by name."""
    to = builder()
    x, w = leaf(to, "input", "x", rows, features), leaf(to, "parameter", "w", results, features)
    y = to.call(aten.linear.default, x, w)
    loss = to.call(aten.sum.default, y)
    return program(to, loss, rows=rows), {"x": x, "w": w, "y": y, "loss": loss}


def factors_of(graph: fx.Graph) -> dict[fx.Node, Factors]:
    return RuleBook(RULES).factors(graph)


@dataclass(frozen=True)
class Prices:
    """A cost model in which everything costs what a test says."""

    operator: float = 1.0
    collective: float = 1.0
    parameter: float = 0.0
    mask: float = 0.0

    def operator_seconds(self, node: fx.Node) -> float:
        return self.operator

    def run_seconds(self, node: fx.Node, share: float, reads: Sequence[float], writes: float) -> StageTimes:
        return StageTimes(self.operator * share, self.operator * share, self.operator * share)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return 0.0

    def send_seconds(self, num_bytes: float, apart: int = 1) -> float:
        return self.collective

    def meeting_seconds(self, name: str, num_bytes: float, ranks: int, apart: int = 1) -> float:
        return self.collective_seconds(name, num_bytes, ranks)

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        return self.collective * num_bytes

    def mask_seconds(self, num_bytes: float) -> float:
        return self.mask * num_bytes

    def parameter_seconds(self, num_bytes: float) -> float:
        return self.parameter * num_bytes


@dataclass(frozen=True)
class View:
    """What the search for one axis' shardings sees; nothing is chosen on axes before it."""

    program: Program
    axis: Axis
    prices: Prices = Prices()
    wishes: ShardingOptions = ShardingOptions()
    chosen: dict[fx.Node, tuple[Strategy, ...]] = field(default_factory=dict)

    def __call__(self) -> AxisView:
        factors = factors_of(self.program.graph)
        nothing: dict[fx.Node, tuple[Strategy, ...]] = dict.fromkeys(factors, ())
        chosen = {**nothing, **self.chosen}
        return AxisView(self.program, self.axis, (), factors, chosen, self.prices, self.wishes, {})


LOSS = Strategy((P,), ())  # what a program returns: the runtime adds up terms of a scalar


def column() -> DifferentiatedProgram:
    """Return a column-parallel layer whose x is gathered over its rows, as sequence parallelism does."""
    to = builder()
    x, v, w = leaf(to, "input", "x", 8, 6), leaf(to, "parameter", "v", 8, 6), leaf(to, "parameter", "w", 4, 6)
    h = to.call(torch.ops.aten.mul.Tensor, x, v)
    y = to.call(torch.ops.aten.linear.default, h, w)
    loss = to.call(torch.ops.aten.sum.default, y)
    whole = program(to, loss)
    kinds = {
        x: Strategy((), (S(0),)), v: Strategy((), (S(0),)), w: Strategy((), (S(0),)),
        h: Strategy((S(0), S(0)), (S(0),), "split d0 1"), y: Strategy((R, S(0)), (S(1),), "split b 1"),
        loss: Strategy((S(1),), (P,), "split d1 1"),
    }  # fmt: skip
    kinds[whole.graph.output_node()] = LOSS
    sharded = ShardedProgram(whole, (TP,), {node: (kind,) for node, kind in kinds.items()})
    staged = FollowStages(1, {"w": (0,), "v": (0,)})(sharded)
    return Differentiate(True)(InsertCommunication(dict(RULES), True)(staged))
