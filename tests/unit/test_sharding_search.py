"""passes.sharding, part by part: candidates, prices of conversions, the integer program, and what is told of it all."""

from __future__ import annotations

import math

import pytest

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ir.program import Axis, Gathered, ShardedProgram, Strategy
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.sharding.axis_search import AxisSearch
from quintnet_compiler.passes.sharding.axis_view import OperandEdge, ShardingOptions, stores_state
from quintnet_compiler.passes.sharding.batch_factors import batch_dependent, batch_factors
from quintnet_compiler.passes.sharding.candidates import Candidates
from quintnet_compiler.passes.sharding.conversion_prices import DISCOURAGED_FACTOR, ConversionPrices, leaves_as_is
from quintnet_compiler.passes.sharding.coupled_rows import coupling
from quintnet_compiler.passes.sharding.follow_sharding import KnownSharding
from quintnet_compiler.passes.sharding.integer_program import FORBIDDEN_SECONDS, IntegerProgram
from quintnet_compiler.passes.sharding.replicated import unsplit
from quintnet_compiler.strategies.rule_book import RuleBook

from .graphs import CP, DP, TIME, TP, Prices, View, builder, factors_of, leaf, linear, program

# -- the integer program


def test_the_cheapest_choice_that_fits() -> None:
    model = IntegerProgram()
    cheap, dear, extra = (model.variable(cost, integral=True) for cost in (1.0, 3.0, 5.0))
    model.choose_one([cheap, dear])
    model.constrain([(extra, 1.0), (cheap, -1.0)], 0, math.inf)  # the cheap one needs the extra one
    solution = model.solve()
    assert solution is not None and solution.round().tolist() == [0, 1, 0]


def test_what_is_forbidden_is_taken_only_where_nothing_else_is_left() -> None:
    model = IntegerProgram()
    way, no_way = model.variable(1e-7, integral=True), model.variable(FORBIDDEN_SECONDS, integral=True)
    model.choose_one([way, no_way])
    solution = model.solve()
    assert solution is not None and solution.round().tolist() == [1, 0]
    model.constrain([(way, 1.0)], 0, 0)
    solution = model.solve()
    assert solution is not None and solution.round().tolist() == [0, 1]
    model.constrain([(no_way, 1.0)], 0, 0)
    assert model.solve() is None


def test_choices_are_whole_where_the_linear_relaxation_is_not() -> None:
    model = IntegerProgram()
    corners = [model.variable(1.0, integral=True) for _ in range(3)]
    for a, b in ((0, 1), (1, 2), (2, 0)):  # one of each two: half of each costs 1.5, whole ones 2
        model.constrain([(corners[a], 1.0), (corners[b], 1.0)], 1, math.inf)
    solution = model.solve()
    assert solution is not None and sorted(solution.round(6).tolist()) == [0, 1, 1]


def test_of_equal_choices_the_first_is_taken() -> None:
    for first in range(4):
        model = IntegerProgram()
        order = [(index - first) % 4 for index in range(4)]
        model.choose_one([model.variable(2.5e-3, integral=True, order=place) for place in order])
        solution = model.solve()
        assert solution is not None and solution.round().tolist() == [float(index == first) for index in range(4)]


# -- candidates


def _leaves(axis: Axis, node: str, wishes: ShardingOptions = ShardingOptions()) -> set[str]:
    made, nodes = linear()
    return {str(s.outputs[0]) for s in Candidates(View(made, axis, wishes=wishes)())(nodes[node], {})}


def test_roles_say_what_leaves_may_be() -> None:
    assert _leaves(DP, "x") == {"S(0)"} and _leaves(DP, "w") == {"R"}
    assert _leaves(CP, "x") == {"I"} and _leaves(CP, "w") == {"R"}
    assert _leaves(TP, "x") == {"I"} and _leaves(TP, "w") == {"S(0)", "S(1)"}  # a matmul's weight is split
    assert _leaves(TP, "w", ShardingOptions({("w", "tp"): S(1)})) == {"S(1)"}


def test_what_does_not_divide_is_refused_with_numbers() -> None:
    made, nodes = linear(rows=1)
    assert [s.outputs for s in Candidates(View(made, DP)())(nodes["x"], {})] == [(I,)]  # all data ranks compute it
    made, nodes = linear(results=3)
    wish = ShardingOptions({("w", "tp"): S(0)})
    assert [s.part for s in Candidates(View(made, TP, wishes=wish)())(nodes["w"], {})] == [2 / 3]
    made, nodes = linear(results=1)
    with pytest.raises(CompileError, match=r"w of shape \(1, 6\) cannot be S\(0\) over tp=2"):
        Candidates(View(made, TP, wishes=wish)())(nodes["w"], {})


def test_data_and_context_axes_store_state() -> None:
    assert stores_state(DP, ()) and stores_state(CP, ()) and not stores_state(TP, ()) and not stores_state(DP, ("dp",))


# -- prices of conversions


def test_conversions_on_a_model_axis() -> None:
    made, nodes = linear()
    view = View(made, TP)()
    price = ConversionPrices(view)
    least = 0.1 * 8 * 4 * 4  # of the typical activation: y, 8 x 4 float32
    edge = OperandEdge(nodes["y"], nodes["loss"], 0, grad=True)
    assert price(edge, R, R, 100.0) == 0
    assert price(edge, P, I, 100.0) == pytest.approx(least + 100)  # all-reduce; its gradient is there already
    assert price(edge, I, P, 100.0) is None
    weight = OperandEdge(nodes["w"], nodes["y"], 1, grad=True)
    assert price(weight, S(0), R, 1.0) == FORBIDDEN_SECONDS  # a parameter's slices are not gathered
    assert leaves_as_is(TP, I, nodes["loss"]) and leaves_as_is(TP, P, nodes["loss"])
    assert not leaves_as_is(TP, P, nodes["y"]) and not leaves_as_is(TP, S(0), nodes["y"])
    assert leaves_as_is(DP, S(0), nodes["y"])


def test_gathers_over_data_ranks_are_dear_and_over_microbatches_impossible() -> None:
    made, nodes = linear()
    edge = OperandEdge(nodes["y"], nodes["loss"], 0, grad=True)
    usual = ConversionPrices(View(made, CP)())(edge, S(0), R, 10.0)
    assert ConversionPrices(View(made, DP)())(edge, S(0), R, 10.0) == pytest.approx(DISCOURAGED_FACTOR * usual)
    assert ConversionPrices(View(made, TIME)())(edge, S(0), R, 10.0) == FORBIDDEN_SECONDS


# -- the search


def _solved(prices: Prices) -> dict[str, Strategy]:
    made, nodes = linear()
    found = AxisSearch(View(made, TP, prices)(), {node: node.name for node in made.graph.nodes}).cheapest_strategies()
    return {name: found[node] for name, node in nodes.items()}


def test_a_matmul_is_split_where_its_weight_is() -> None:
    found = _solved(Prices(operator=1.0, collective=1e-9))
    assert found["y"].splits and found["w"].outputs == (found["y"].inputs[1],)
    assert found["w"].outputs[0] in (S(0), S(1)) and found["loss"].outputs[0] in (P, I)


def test_zeros_in_padding_have_a_price() -> None:
    """Of 3 features over 2 ranks what is read, [8, 2] on each; of 5 results their gradients, [8, 3], forward and
    backward; of 8 rows nothing."""
    to = builder()
    x, w = leaf(to, "input", "x", 8, 3), leaf(to, "parameter", "w", 5, 3)
    y = to.call(aten.linear.default, to.call(aten.relu.default, x), w)
    made = program(to, to.call(aten.sum.default, y), rows=8)
    view = View(made, TP, Prices(operator=0.0, mask=1.0))()
    search = AxisSearch(view, {node: node.name for node in made.graph.nodes})
    prices = {s.inputs: search._work(y, s) for s in view.legal(y, {}) if s.splits}
    assert prices == pytest.approx({(S(1), S(1)): 8 * 2 * 4, (I, S(0)): 2 * 8 * 3 * 4, (S(0), R): 0.0})


def test_another_length_is_split_as_the_first_one() -> None:
    made, nodes = linear(features=6, results=4)
    view = View(made, TP)()
    kept = {**AxisSearch(view, {node: node.name for node in made.graph.nodes}).cheapest_strategies()}
    row = next(s for s in view.legal(nodes["y"], {}) if s.inputs == (S(1), S(1)))
    kept |= {nodes["y"]: row, nodes["w"]: Strategy((), (S(1),), "split d1 1"), nodes["x"]: Strategy((), (S(1),), "")}
    known = ShardedProgram(made, (TP,), {node: (strategy,) for node, strategy in kept.items()})
    other, same = linear(features=8, results=6)
    found = KnownSharding.match(other, (TP,), known)
    assert found is not None
    choice = found.choice(View(other, TP)())
    assert choice is not None and choice[same["y"]] == row and choice[same["w"]].outputs == (S(1),)
    odd = linear(features=7)[0]
    refused = KnownSharding.match(odd, (TP,), known)
    assert refused is not None and refused.choice(View(odd, TP)()) is None, "7 features do not divide"
    stored = ShardedProgram(made, (TP,), known.strategies, {nodes["w"]: Gathered((I,), once=True, deferred=False)})
    whole = KnownSharding.match(other, (TP,), stored)
    assert whole is not None and (whole.choice(View(other, TP)()) or {})[same["w"]].outputs == (I,)


def test_programs_that_differ_in_more_than_lengths_are_not_followed() -> None:
    made, _ = linear()
    known = ShardedProgram(made, (TP,), {})
    assert KnownSharding.match(made, (TP,), None) is None and KnownSharding.match(made, (DP,), known) is None
    assert KnownSharding.match(linear(rows=4)[0], (TP,), known) is None, "another number of rows"
    to = builder()
    x, w = leaf(to, "input", "x", 8, 6), leaf(to, "parameter", "w", 4, 6)
    other = program(to, to.call(aten.mean.default, to.call(aten.linear.default, x, w)))
    assert KnownSharding.match(other, (TP,), known) is None


def test_a_conversion_that_no_rank_could_do_names_its_place() -> None:
    to = builder()
    x, w = leaf(to, "input", "x", 4, 6), leaf(to, "parameter", "w", 4, 6)
    y = to.call(aten._softmax.default, to.call(aten.linear.default, x, w), 0, False)
    made = program(to, to.call(aten.sum.default, y), rows=4)
    with pytest.raises(CompileError, match="does not split the dim of the batch") as told:
        AxisSearch(View(made, TIME)(), {node: node.name for node in made.graph.nodes}).cheapest_strategies()
    assert told.value.code == "QN104" and "microbatches=1" in told.value.fix


def test_what_couples_rows() -> None:
    made, _ = linear()
    assert coupling(made.graph, factors_of(made.graph)) is None
    to = builder()
    x = leaf(to, "input", "x", 4, 6)
    total = to.call(aten.sum.default, x)
    root = to.call(aten.sqrt.default, total)
    made = program(to, root, rows=4)
    place, why = coupling(made.graph, factors_of(made.graph)) or (None, "")
    assert place is root and "needs the sum over all rows that comes out of aten.sum" in why


def test_which_factors_are_the_batch() -> None:
    made, nodes = linear()
    factors = factors_of(made.graph)
    found = batch_factors(made.graph, factors)
    (rows,) = found[nodes["y"]]
    assert factors[nodes["y"]].inputs[0][0] == (rows,) and not found[nodes["w"]]
    assert batch_dependent(made.graph) == {nodes["y"], nodes["loss"]}


# -- what a layout does not split


def test_a_matmul_that_every_rank_computes_is_told() -> None:
    made, nodes = linear(features=3, results=5)
    whole = Strategy((I, I), (I,), "replicated")
    strategies = dict.fromkeys(nodes.values(), (whole,))
    sharded = ShardedProgram(made, (TP,), strategies)
    (line,) = unsplit(sharded, RuleBook(RULES))
    assert line == "tp=2: linear of [8, 3] x [5, 3] in the model runs whole on every rank: by choice"
    rows = next(s for s in View(made, TP)().legal(nodes["y"], {}) if s.splits and s.outputs == (S(0),))
    split = {**strategies, nodes["y"]: (rows,)}
    assert unsplit(ShardedProgram(made, (TP,), split), RuleBook(RULES)) == ()


@pytest.mark.parametrize(("groups", "sizes"), [(1, [4, 4, 3, 3]), (4, [4, 1, 3, 3])])
def test_a_convolution_that_every_rank_computes_is_told(groups: int, sizes: list[int]) -> None:
    """Of groups of one channel (depthwise), too."""
    to = builder()
    x, w = leaf(to, "input", "x", 2, 4, 6, 6), leaf(to, "parameter", "w", *sizes)
    y = to.call(aten.conv2d.default, x, w, None, [1, 1], [1, 1], [1, 1], groups)
    loss = to.call(aten.sum.default, y)
    made = program(to, loss, rows=2)
    strategies = dict.fromkeys((x, w, y, loss), (Strategy((I, I), (I,), "replicated"),))
    (line,) = unsplit(ShardedProgram(made, (TP,), strategies), RuleBook(RULES))
    assert line == f"tp=2: conv2d of [2, 4, 6, 6] x {sizes} in the model runs whole on every rank: by choice"
    chosen = next(s for s in View(made, TP)().legal(y, {}) if s.splits)
    assert unsplit(ShardedProgram(made, (TP,), {**strategies, y: (chosen,)}), RuleBook(RULES)) == ()
