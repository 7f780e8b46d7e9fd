"""ops.rules, strategies, checks: factors of single operators, and what the checks' own tables say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from quintnet_compiler.checks.derivatives import proven
from quintnet_compiler.checks.derivatives.calls import OperatorCall, Pattern
from quintnet_compiler.checks.derivatives.numbers import check_numbers
from quintnet_compiler.checks.derivatives.proven import Derivatives
from quintnet_compiler.checks.expert_layers import axes_of_travel
from quintnet_compiler.checks.strategies import Reading
from quintnet_compiler.checks.tables import CONVERSIONS
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.core.slices import join, pad, slice_of_rank, stack, unstack
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ir.program import Axis, Strategy
from quintnet_compiler.ops.collectives import all_gather, all_reduce, lower_conversion, reduce_scatter
from quintnet_compiler.ops.derivatives.user_derivatives import with_tangent
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.rules import contractions, lookups, reductions, user_derivatives, views
from quintnet_compiler.ops.rules.node_factors import aligned, argument, chosen_dims
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.strategies.expert_axes import check_experts, exchanging_strategies, expert_parameters
from quintnet_compiler.strategies.rule_book import RuleBook, strategies

from .graphs import TP, builder, leaf, linear


def _call(target: Any, *sizes: tuple[int, ...], **options: Any) -> fx.Node:
    to = builder()
    return to.call(target, *(leaf(to, "parameter", f"x{i}", *size) for i, size in enumerate(sizes)), **options)


def test_a_matmul_contracts_one_factor() -> None:
    found = contractions.matmul(_call(aten.matmul.default, (2, 3, 4), (4, 5)))
    (rows, inner), (inner2, columns) = found.inputs[0][1:], found.inputs[1]
    assert inner == inner2 and found.outputs[0] == (found.inputs[0][0], rows, columns)
    assert sorted(found.sizes.values()) == [2, 3, 4, 5]


def test_a_reshape_keeps_the_outer_factor_of_what_it_joins() -> None:
    to = builder()
    node = to.call(aten.reshape.default, leaf(to, "input", "x", 6, 4), [2, 12])
    found = views.reshape(node)
    (rows, rest) = found.outputs[0]
    assert found.inputs[0][0][0] == rows[0] and found.sizes[rows[0]] == 2 and len(rest) == 2


def test_a_sum_is_linear_and_a_lookup_splits_its_vocabulary() -> None:
    to = builder()
    node = to.call(aten.sum.dim_IntList, leaf(to, "input", "x", 4, 6), [1])
    found = reductions.reduction(sums=True, linear=True)(node)
    assert found.outputs[0] == (found.inputs[0][0],) and found.linear == ((0,),)
    to = builder()
    weight, ids = leaf(to, "parameter", "w", 10, 4), leaf(to, "input", "ids", 3, dtype=torch.int64)
    found = lookups.embedding(to.call(aten.embedding.default, weight, ids))
    assert found.outputs[0] == (found.inputs[1][0], found.inputs[0][1])


def test_a_value_and_its_gradient_have_types_that_fit() -> None:
    to = builder()
    found = user_derivatives.with_tangent(to.call(with_tangent, leaf(to, "parameter", "x", 4, 6), False))
    assert found.inputs[0] == found.outputs[0] == found.outputs[1]
    assert found.dual == ((1, 2),)  # operands 1 and 2 are a value and its gradient


def test_arguments_by_name() -> None:
    to = builder()
    node = to.call(aten.sum.dim_IntList, leaf(to, "input", "x", 4, 6), [1])
    assert argument(node, "dim") == [1] and argument(node, "keepdim") is False
    assert chosen_dims(-1, 3) == [2] and chosen_dims(None, 2) == [0, 1] and chosen_dims([0, -1], 3) == [0, 2]
    assert aligned([("m",), ("n",)], {"m": 4, "n": 6}, (4, 1)) == (("m",), ())


def _mixture() -> tuple[fx.Graph, fx.Node]:
    to = builder()
    rows, ids = leaf(to, "input", "rows", 8, 6), leaf(to, "input", "ids", 8, dtype=torch.int64)
    node = to.call(expert_linear, rows, ids, leaf(to, "parameter", "w", 4, 5, 6), None, False)
    to.output((node,))
    return to.graph, node


def test_experts_travel_where_rows_and_experts_are_both_split() -> None:
    graph, node = _mixture()
    assert {n.name for n in expert_parameters(graph)} == {"w"}
    ep = Axis("ep", 2, "data")
    found = exchanging_strategies(node, strategies(node, lookups.expert_linear(node), {}, 2), ep)
    assert found and all(one.exchanges for one in found)
    assert axes_of_travel([ep], [found[0]]) == [(ep, 1)]
    whole = Strategy((S(0), S(0), R), (S(0),), "split n 1")
    assert axes_of_travel([ep, ep], [whole, found[0]]) == [(ep, 1)]
    with pytest.raises(CompileError, match="4 experts cannot be spread over ep=3"):
        exchanging_strategies(node, (whole,), Axis("ep", 3, "data"))
    check_experts(graph, ["ep"])
    with pytest.raises(CompileError, match="the model has no expert_linear"):
        check_experts(linear()[0].graph, ["ep"])


def test_the_check_reads_types_to_factors() -> None:
    _, nodes = linear()
    rule = RULES[aten.linear.default].factors(nodes["y"])

    def why(*inputs: Any, out: Any) -> str:
        return Reading(nodes["y"], rule).apply_strategy(Strategy(inputs, (out,), ""), TP.size)[0]

    assert why(S(0), R, out=S(0)) == "" and why(S(1), S(1), out=P) == "" and why(I, I, out=I) == ""
    assert "makes no I" in why(S(1), S(1), out=I) and "takes no I" in why(S(0), I, out=S(0))
    assert why(S(0), S(1), out=S(0)) and why(P, P, out=P)


def test_conversions_are_those_of_the_passes_and_transposes_go_back() -> None:
    kinds = {"I": I, "R": R, "P": P, "S": S(0)}
    for (before, after), (forward, _) in CONVERSIONS.items():
        target = S(1) if before == after == "S" else kinds[after]
        assert lower_conversion(kinds[before], target)[0] is forward, (before, after)
    assert CONVERSIONS["P", "I"] == (all_reduce, None) and CONVERSIONS["S", "R"] == (all_gather, reduce_scatter)


def test_slices() -> None:
    x = torch.arange(12)
    parts = [slice_of_rank(x, 0, 3, 2, rank) for rank in range(2)]
    assert parts[1].tolist() == [2, 3, 6, 7, 10, 11] and torch.equal(join(parts, 0, 3), x)
    assert torch.equal(stack(x, 0, 3, 2), torch.stack(parts)) and torch.equal(unstack(torch.stack(parts), 0, 3), x)
    assert pad(parts[0], 0, 3, 2, 0).tolist() == [0, 1, 0, 0, 4, 5, 0, 0, 8, 9, 0, 0]


def test_a_wrong_derivative_is_noticed() -> None:
    to, templates = builder(), dict[Any, Any]()
    with to.mode:
        x, t = torch.empty(2, 3), torch.empty(2, 3)
    stands = fx.Graph().placeholder("x")
    call = OperatorCall(aten.sin.default, ((stands,), {}), (x,), (True,), (0,), (t,), (0,))
    pattern = Derivatives(to, templates).pattern(call)
    assert pattern.gradients[0] is not None and pattern.gradients[0].target is aten.mul.Tensor
    (template,) = templates.values()
    (cosine,) = (node for node in template.graph.nodes if node.target is aten.cos.default)
    cosine.target = aten.sin.default
    with pytest.raises(CompileError, match=r"the derivative of aten\.sin\.default is wrong"):
        Derivatives(to, templates).pattern(call)


@pytest.mark.parametrize(("heads", "halves"), [(8, 16), (2, 8)], ids=str)
def test_the_derivative_of_a_large_split_is_proven(heads: int, halves: int) -> None:
    """Its sizes still add up when it is made smaller."""
    to, templates = builder(), dict[Any, Any]()
    with to.mode:
        x, t = torch.empty(4, heads, 64, 2 * halves), torch.empty(4, heads, 64, halves)
    given = (fx.Graph().placeholder("x"), [halves, halves], -1), dict[str, Any]()
    call = OperatorCall(aten.split_with_sizes.default, given, (x,), (True,), (0,), (t, t), (0, 1))
    Derivatives(to, templates).pattern(call)
    for template in templates.values():
        (joined,) = (node for node in template.graph.nodes if node.target is aten.cat.default)
        joined.args = (list(reversed(joined.args[0])), *joined.args[1:])
    with pytest.raises(CompileError, match=r"the derivative of aten\.split_with_sizes\.default is wrong"):
        Derivatives(to, templates).pattern(call)


def test_a_smaller_call_is_proven_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ in a length have one smaller call; one that differs in more has another one."""
    compared: list[tuple[int, ...]] = []

    def check(call: OperatorCall, pattern: Pattern) -> bool:
        compared.append(tuple(call.operands[0].shape))
        return check_numbers(call, pattern)

    monkeypatch.setattr(proven, "check_numbers", check)
    known = set[Any]()
    for length, width in ((100, 512), (300, 512), (100, 512), (7, 512), (600, 512)):
        to = builder()
        with to.mode:
            x, t = torch.empty(8, length, width), torch.empty(8, length, 1)
        given = (fx.Graph().placeholder("x"), [-1], True), dict[str, Any]()
        call = OperatorCall(aten.sum.dim_IntList, given, (x,), (True,), (0,), (t,), (0,))
        Derivatives(to, {}, proven=known).pattern(call)
    assert compared == [(8, 10, 12), (8, 7, 12), (8, 12, 10)]  # the third is longer than wide


LARGE = (64, 128, 16)


@pytest.mark.parametrize(
    ("op", "shapes", "literals"),
    [
        (aten.select.int, [LARGE], (2, 10)),
        (aten.select.int, [LARGE], (1, -100)),
        (aten.select.int, [(4096, 4096)], (0, 4000)),
        (aten.select_scatter.default, [LARGE, (64, 128)], (2, 10)),
        (aten.select_scatter.default, [LARGE, (64, 128)], (2, -12)),
        (aten.slice.Tensor, [LARGE], (1, 100, 110)),
        (aten.slice.Tensor, [LARGE], (1, -100, 2**63 - 1)),
        (aten.slice.Tensor, [LARGE], (1, 0, 2**63 - 1, 16)),
        (aten.slice_scatter.default, [LARGE, (64, 10, 16)], (1, 100, 110)),
        (aten.slice_scatter.default, [LARGE, (64, 8, 16)], (1, 120, 128)),
        (aten.slice_scatter.default, [LARGE, (64, 28, 16)], (1, 100, 2**63 - 1)),
        (aten.narrow.default, [LARGE], (1, 100, 28)),
        (aten.split.Tensor, [LARGE], (20, 1)),
        (aten.split_with_sizes.default, [LARGE], ([100, 20, 8], 1)),
        (aten.unfold.default, [LARGE], (1, 100, 7)),
        (aten.diagonal.default, [LARGE], (100, 0, 1)),
        (aten.constant_pad_nd.default, [LARGE], ([0, 0, -100, 0],)),
        (aten.kthvalue.default, [LARGE], (100, 1)),
        (aten.avg_pool1d.default, [LARGE], ([12], [4])),
        (aten.as_strided.default, [LARGE], ([64, 16], [2048, 1], 2032)),
        (aten.reshape.default, [(1, 8192, 2048)], ([1, 8192, 16, 128],)),
    ],
    ids=lambda x: str(x).removeprefix("aten."),
)
def test_numbers_among_arguments_fit_the_smaller_operands(op: Any, shapes: Any, literals: Any) -> None:
    """The derivative of a large call is proven, whatever index of a dim or size its arguments name."""
    to, templates = builder(), dict[Any, Any]()
    with to.mode:
        operands = tuple(torch.empty(shape) for shape in shapes)
        made = op(*operands, *literals)
    outs = made if isinstance(made, (tuple, list)) else (made,)
    arrives = tuple(torch.empty_like(out) if out.is_floating_point() else None for out in outs)
    count, stands = len(operands), fx.Graph()
    given = (*(stands.placeholder(f"x{i}") for i in range(count)), *literals), dict[str, Any]()
    wanted = tuple(i for i, t in enumerate(arrives) if t is not None)
    call = OperatorCall(op, given, operands, (True,) * count, tuple(range(count)), arrives, wanted)
    Derivatives(to, templates).pattern(call)
    for key, template in list(templates.items()):
        negative = []
        for gradient in template.gradients:
            with template.graph.inserting_after(gradient):
                negative.append(template.graph.call_function(aten.neg.default, (gradient,)))
            negative[-1].meta = dict(gradient.meta)
        templates[key] = replace(template, gradients=tuple(negative))
    with pytest.raises(CompileError, match="gradient 0 is off"):
        Derivatives(to, templates).pattern(call)


def test_operands_of_sizes_that_are_multiples_by_chance_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """8192 positions are four times the 16 heads of 128: that says nothing about a reshape of the heads."""
    to, drawn, draw = builder(), list[int](), torch.randn

    def counted(count: int, **options: Any) -> torch.Tensor:
        drawn.append(count)
        return draw(count, **options)

    with to.mode:
        x, t = torch.empty(1, 8192, 2048), torch.empty(1, 8192, 16, 128)
    given = (fx.Graph().placeholder("x"), [1, 8192, 16, 128]), dict[str, Any]()
    monkeypatch.setattr(torch, "randn", counted)
    Derivatives(to, {}).pattern(OperatorCall(aten.reshape.default, given, (x,), (True,), (0,), (t,), (0,)))
    assert drawn and sum(drawn) <= 1 << 17


def test_operators_of_the_same_shapes_share_their_factors() -> None:
    to = builder()
    x = leaf(to, "input", "x", 4, 6)
    same = [to.call(aten.relu.default, to.call(aten.relu.default, x)), to.call(aten.relu.default, x)]
    other = to.call(aten.relu.default, leaf(to, "input", "y", 4, 8))
    found = RuleBook(RULES).factors(to.graph)
    assert found[same[0]] is found[same[1]] and found[other].sizes != found[same[0]].sizes
