"""passes.sharding.row_travel: what rows cost on their way to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from quintnet_compiler.core.annotations import shape
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ir.expectations import ExpertLoad
from quintnet_compiler.ir.program import Axis, Strategy
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.passes.sharding.axis_view import AxisView, ShardingOptions
from quintnet_compiler.passes.sharding.row_travel import RowTravel
from quintnet_compiler.strategies.rule_book import refine

from .graphs import CP, TP, Prices, builder, factors_of, leaf, program

EP = Axis("ep", 4, "data")
ROWS, WIDTH, WIDE = 32, 8, 16
OVER_EP = Strategy((S(0), S(0), S(0)), (S(0),), "split r+e 1")
COLUMNS = Strategy((R, I, S(1)), (S(1),), "split o 1")
BY_ROWS = Strategy((S(1), I, S(2)), (P,), "split i 1")
SLICED_IN = Strategy((S(1), I, S(1)), (S(1),), "split o 1", inside=(R, S(1)))
SLICED_OUT = Strategy((S(1), I, S(2)), (S(1),), "split i 1", inside=(S(1), P))


@dataclass(frozen=True)
class Apart(Prices):
    """A byte of a message costs as much as its ranks lie apart."""

    def meeting_seconds(self, name: str, num_bytes: float, ranks: int, apart: int = 1) -> float:
        return num_bytes * apart * {"all_to_all": 1 / ranks, "all_gather": 100, "reduce_scatter": 10_000}[name]


def _travel(before: Sequence[Axis] = (EP,)) -> tuple[RowTravel, fx.Node, fx.Node]:
    """Of two layers of a mixture, whose rows are split over the axes ``before``, with ``tanh`` between."""
    to = builder()
    x, ids = leaf(to, "input", "x", ROWS, WIDTH), leaf(to, "input", "ids", ROWS, dtype=torch.int64)
    up, down = leaf(to, "parameter", "up", 8, WIDE, WIDTH), leaf(to, "parameter", "down", 8, WIDTH, WIDE)
    first = to.call(expert_linear, x, ids, up, None, False)
    last = to.call(expert_linear, to.call(aten.tanh.default, first), ids, down, None, False)
    made = program(to, to.call(aten.sum.default, last))
    factors, chosen = factors_of(made.graph), dict[fx.Node, tuple[Strategy, ...]]()
    for node in factors:
        if node.target is expert_linear:
            chosen[node] = (OVER_EP, *([Strategy((S(0), S(0), R), (S(0),), "split ri 1")] * (len(before) - 1)))
            factors[node] = refine(factors[node], OVER_EP, EP.size)
        else:
            of_rows = len(shape(node)) == 2
            chosen[node] = (Strategy((), (S(0) if of_rows else I,)),) * len(before)
    return RowTravel(AxisView(made, TP, tuple(before), factors, chosen, Apart(), ShardingOptions(), {})), first, last


def test_each_rank_sends_all_of_a_row_or_its_slice() -> None:
    travel, first, last = _travel()
    rows = ROWS * WIDTH * 4 // EP.size  # bytes on a rank, of what goes there and of what comes back
    there = 2 * TP.size * rows  # forward and backward, over links between ranks that lie so far apart
    assert travel(first, COLUMNS) == there and travel(last, BY_ROWS) == there
    assert travel(first, SLICED_IN) == there / TP.size + 2 * 100 * rows
    assert travel(last, SLICED_OUT) == there / TP.size + 2 * 10_000 * rows


def test_between_layers_rows_stay_where_nothing_moves_them() -> None:
    travel, first, last = _travel()
    wide = 2 * TP.size * ROWS * WIDE * 4 // EP.size
    assert travel(first, BY_ROWS) == travel(first, SLICED_IN) - 2 * 100 * (ROWS * WIDTH * 4 // EP.size) + wide
    assert travel(last, COLUMNS) == wide + travel(last, BY_ROWS) / TP.size  # what it reads is gathered in between


def test_ranks_of_axes_within_lie_between_neighbours() -> None:
    near, far = _travel()[0], _travel((EP, CP))
    assert far[0](far[1], COLUMNS) == near(_first(near), COLUMNS)  # half the rows, twice as far


def _first(travel: RowTravel) -> fx.Node:
    return next(iter(travel.hops))


def test_the_busiest_rank_is_sent_and_gathers_more() -> None:
    """And of the rows of its experts, those of hot ones are its own."""
    travel, first, last = _travel()
    even = {s: travel(n, s) for n, s in ((first, COLUMNS), (first, SLICED_IN), (last, SLICED_OUT))}
    loads = dict.fromkeys((first, last), ExpertLoad(computed=3.0, sent=2.5))
    busy = RowTravel(replace(travel.view, constraints=ShardingOptions(loads=loads)))
    rows = ROWS * WIDTH * 4 // EP.size
    assert busy(first, COLUMNS) == 2.5 * even[COLUMNS]
    assert busy(first, SLICED_IN) == 2.5 * even[SLICED_IN] + 0.5 * 2 * 100 * rows
    assert busy(last, SLICED_OUT) == 2.5 * even[SLICED_OUT] + 0.5 * 2 * 10_000 * rows


def test_layers_of_the_same_rows_share_what_arrives() -> None:
    travel, first, _ = _travel()
    alone = travel(first, SLICED_IN)
    travel.part[first] = 0.5
    assert travel(first, SLICED_IN) == alone / 2


def test_nothing_else_travels() -> None:
    travel, first, _ = _travel()
    view = travel.view
    assert travel(first.all_input_nodes[0], COLUMNS) == 0.0
    alone = AxisView(
        view.program, TP, (), view.factors, dict.fromkeys(view.factors, ()), Apart(), ShardingOptions(), {}
    )
    assert RowTravel(alone)(first, COLUMNS) == 0.0
