"""What lowers layers of experts in 8 bits, and the check that reads them back: each mistake is found."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import quintnet
from quintnet_compiler.checks.extensions import LayerError
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, P, R, S
from quintnet_compiler.driver import pipeline
from quintnet_compiler.driver.compiler import Runner
from quintnet_compiler.features.fp8.checks.eight_bits import check_eight_bits
from quintnet_compiler.features.fp8.checks.scaled_experts import ScaledLayer
from quintnet_compiler.features.fp8.ops.scaled_groups import (
    group_cast,
    group_max,
    scaled_expert_linear,
    scaled_grouped_linear,
    scaled_grouped_weight_grad,
)
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast
from quintnet_compiler.features.fp8.scaled_experts import ScaledExperts
from quintnet_compiler.ir.program import Axis, LocalProgram, Strategy
from quintnet_compiler.ops.derivatives.user_derivatives import after_gradients, declare_gradient

from ..test_eight_bit_experts import Mixture, batch
from .graphs import builder, leaf

pytestmark = pytest.mark.usefixtures("shared_captures")
aten = torch.ops.aten
AXES = Axis("dp", 2, "data"), Axis("microbatches", 2, "time"), Axis("ep", 2, "data"), Axis("tp", 2, "model")


def _strategies(tp: Strategy) -> tuple[Strategy, ...]:
    rows = Strategy((S(0), S(0), R), (S(0),), "split r 1")
    return rows, rows, Strategy((S(0), S(0), S(0)), (S(0),), "split r+e 1"), tp


def _axes_of_scales(*, row: bool, tp: Strategy) -> list[list[str]]:
    """The axes of each scale in a layer: of its rows, and, where it has gradients, of these."""
    to = builder()
    rows, weight = leaf(to, "parameter", "x", 8, 4), leaf(to, "parameter", "w", 2, 6, 4)
    ends, scale = leaf(to, "input", "ends", 2), leaf(to, "input", "s", 2, 6, 1)
    layer = ScaledExperts(to, AXES, _strategies(tp), [0, 0] if row else [], torch.float8_e5m2, False, True)
    eight = to.call(scaled_cast, leaf(to, "input", "w8", 2, 6, 4), scale, torch.float8_e4m3fn)
    made = layer(rows, ends, weight, None, False, (eight, scale), (eight, scale))
    assert made.target is after_gradients and len(made.args[1]) == 2  # type: ignore[arg-type]
    found = []
    for node in to.made:
        if node.target is block_scale:
            axes, here = [], node.args[0]
            while here.target is aten.amax.default:  # type: ignore[union-attr]
                here = here.args[0]  # type: ignore[union-attr]
                axes.append(here.args[1])  # type: ignore[union-attr]
                here = here.args[0].args[0]  # type: ignore[union-attr]
            found.append(axes)
    return found


def test_a_scale_is_the_largest_of_the_ranks_that_have_parts_of_it() -> None:
    columns = Strategy((R, I, S(1)), (S(1),), "split o 1")
    inside = Strategy((S(1), I, S(1)), (S(1),), "split o 1", inside=(R, S(1)))
    terms = Strategy((S(1), I, S(2)), (P,), "split i 1")
    for tp in (columns, inside):  # of rows, of gradients, of the columns of each
        assert _axes_of_scales(row=True, tp=tp) == [[], ["tp"], ["dp"], ["dp"]]
    assert _axes_of_scales(row=True, tp=terms) == [["tp"], [], ["dp"], ["dp"]]
    assert _axes_of_scales(row=False, tp=columns) == [["dp", "ep"], ["dp", "ep", "tp"]]


# -- the check


def _compiled(recipe: str, mesh: dict[str, int]) -> tuple[LocalProgram, Any]:
    seen: list[Any] = []
    x, y = batch()
    with mock.patch.object(pipeline, "check_types", lambda local, book: seen.append((local, book))):
        quintnet.compile(Mixture(), quintnet.Mesh(**mesh), (x.float(), y), precision="fp8", fp8_recipe=recipe)
    local, book = seen[0]
    return local, book


def _nodes(local: LocalProgram, target: Any) -> list[fx.Node]:
    return [n for n in local.graph.nodes if n.target is target]


def _set(node: fx.Node, position: int, to: Any) -> None:
    node.args = (*node.args[:position], to, *node.args[position + 1 :])


def _other_scale(local: LocalProgram) -> None:
    first, second = _nodes(local, scaled_grouped_linear)[:2]
    _set(first, 3, second.args[3])


def _scale_of_this_rank(local: LocalProgram) -> None:
    largest = _nodes(local, aten.amax.default)
    mine = next(n for n in largest if any(u.target is block_scale and _of_experts(u) for u in n.users))
    inner = mine.args[0].args[0].args[0]  # type: ignore[union-attr]
    mine.replace_all_uses_with(inner)  # type: ignore[arg-type]


def _of_experts(scale: fx.Node) -> bool:
    reads = (scaled_grouped_linear, scaled_grouped_weight_grad)
    return any(u.target in reads for u in scale.users)


def _turned(local: LocalProgram) -> None:
    node = _nodes(local, scaled_grouped_weight_grad)[0]
    _set(node, 5, not node.args[5])


def _gradients_swapped(local: LocalProgram) -> None:
    node = _nodes(local, scaled_grouped_weight_grad)[0]
    node.args = (node.args[1], node.args[0], node.args[2], node.args[4], node.args[3], *node.args[5:])


def _another_format(local: LocalProgram) -> None:
    node = _nodes(local, scaled_grouped_linear)[0].args[3]
    assert isinstance(node, fx.Node)
    _set(node, 2, not node.args[2])


def _lost(local: LocalProgram) -> None:
    node = next(n for n in _nodes(local, after_gradients) if _expert_layer(n))
    _set(node, 1, node.args[1][:-1])  # type: ignore[index]


def _expert_layer(node: fx.Node) -> bool:
    return node.args[0].args[0].args[0].target is scaled_grouped_linear  # type: ignore[union-attr]


def _of_another_layer(local: LocalProgram) -> None:
    says = [n for n in _nodes(local, declare_gradient) if n.args[1].target is scaled_grouped_weight_grad]  # type: ignore[union-attr]
    first, second = says[:2]
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])


def _other_rows(local: LocalProgram) -> None:
    groups = _nodes(local, group_max)
    _set(groups[0], 0, next(n.args[0] for n in groups if n.args[0] is not groups[0].args[0]))


def _a_bias_is_lost(local: LocalProgram) -> None:
    node = next(n for n in _nodes(local, scaled_grouped_linear) if n.args[5] is not None)
    _set(node, 5, None)


MISTAKES = [
    _other_scale, _scale_of_this_rank, _turned, _gradients_swapped, _another_format, _lost,
    _of_another_layer, _other_rows, _a_bias_is_lost,
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: Any, recipe: str) -> None:
    local, book = _compiled(recipe, {"dp": 2, "ep": 2, "tp": 2})
    check_types(local, book)
    mistake(local)
    with pytest.raises(CompileError, match="type check"):
        check_types(local, book)


def test_blocks_of_another_size_are_found() -> None:
    """A gradient that arrives has two blocks of 32 numbers, and is scaled by whole rows."""
    local, book = _compiled("mxfp8", {"ep": 2})
    check_types(local, book)
    largest = next(n for n in _nodes(local, block_max) if n.args[1] == [1, 32] and _of_rows(n))
    _set(largest, 1, [1, 0])
    with pytest.raises(CompileError, match="is not the largest of rows"):
        check_types(local, book)


def _of_rows(largest: fx.Node) -> bool:
    return any(_of_experts(scale) for scale in largest.users)


def test_the_weight_of_the_other_direction_is_found() -> None:
    local, book = _compiled("rowwise", {"ep": 2})
    first = _nodes(local, scaled_grouped_linear)[0]
    back = next(n for n in _nodes(local, scaled_grouped_linear) if n.args[2] is not first.args[2])
    first.args, back.args = _swapped(first.args, back.args)
    with pytest.raises(CompileError, match="multiplies other operands"):
        check_types(local, book)


def _swapped(one: Any, other: Any) -> tuple[Any, Any]:
    """Arguments of two products, each with the matrices of the other."""
    return tuple((*a[:2], b[2], a[3], b[4], *a[5:]) for a, b in ((one, other), (other, one)))  # type: ignore[return-value]


def test_what_is_no_product_of_8_bits_is_none_of_a_layer() -> None:
    to = builder()
    node = to.call(
        group_cast,
        leaf(to, "input", "x", 4, 8),
        leaf(to, "input", "e", 2),
        leaf(to, "input", "s", 2, 8),
        torch.float8_e4m3fn,
    )
    with pytest.raises(LayerError, match="is no product of 8-bit rows"):
        ScaledLayer(node, (), (), ()).read_product(node)


# -- the program before it is lowered


@pytest.fixture(scope="module")
def programs() -> tuple[Any, Any]:
    """Return a program before and after its layers have 8 bits. Whoever changes a node restores it."""
    seen: list[Any] = []
    x, y = batch()

    def keep(runner: Runner, check: Any, *arguments: Any) -> None:
        if check is check_eight_bits:
            seen.append(arguments)

    with mock.patch.object(Runner, "check", keep):
        quintnet.compile(Mixture(), quintnet.Mesh(), (x.float(), y), precision="fp8", fp8_recipe="rowwise")
    before, after = seen[0]
    return before, after


@pytest.mark.parametrize(("position", "of"), [(5, 5), (6, 6), (5, 7), (6, 8), (2, 2), (4, None), (9, None)])
def test_a_layer_with_other_weights_is_found(programs: tuple[Any, Any], position: int, of: int | None) -> None:
    before, after = programs
    check_eight_bits(before, after)
    first, second = (n for n in after.graph.nodes if n.target is scaled_expert_linear)
    wrong: Any = not first.args[position] if position == 4 else []
    if of is not None:
        wrong = (second if position == of else first).args[of]
    right = first.args[position]
    _set(first, position, wrong)
    with pytest.raises(CompileError, match="8-bit check"):
        check_eight_bits(before, after)
    _set(first, position, right)
