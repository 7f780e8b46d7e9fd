"""Which parameters are gathered in 8 bits, and over which ranks their scales are taken."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.checks.types import check_types
from quintnet_compiler.core.annotations import leaf
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, R, S
from quintnet_compiler.driver import pipeline
from quintnet_compiler.features.fp8 import scales
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, scaled_cast
from quintnet_compiler.ops.casts import parameter_of
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.sharding import shard_parameters
from quintnet_compiler.passes.sharding.cast_slices import slice_cast_strategies
from quintnet_compiler.strategies.rule_book import RuleBook

pytestmark = pytest.mark.usefixtures("shared_captures")
aten = torch.ops.aten


def _asked(model: nn.Module, mesh: dict[str, int], recipe: str) -> tuple[dict[str, tuple[Any, ...]], Any, Any]:
    """What :func:`slice_cast_strategies` was asked, by name of the parameter; and the program that was checked."""
    seen: dict[str, tuple[Any, ...]] = {}
    checked: list[Any] = []

    def keep(program: Any, node: Any, kinds: Any, book: Any) -> Any:
        known = leaf(node)
        assert known is not None
        seen[known.name] = program, node, kinds
        return slice_cast_strategies(program, node, kinds, book)

    given = torch.randn(8, 32), torch.randn(8, 16)
    plan = {"precision": "fp8", "fp8_recipe": recipe, "zero": 3}
    with (
        mock.patch.object(shard_parameters, "slice_cast_strategies", keep),
        mock.patch.object(pipeline, "check_types", lambda local, book: checked.append((local, book))),
    ):
        quintnet.compile(model, quintnet.Mesh(**mesh), given, loss_fn=F.mse_loss, plan=plan)
    return seen, *checked[0]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 16))


def test_slices_are_cast_where_products_read_nothing_else() -> None:
    seen, _, _ = _asked(_model(), {"dp": 2}, "rowwise")
    program, weight, kinds = seen["0.weight"]
    assert kinds == (S(0),)
    found = slice_cast_strategies(program, weight, kinds, RuleBook(RULES))
    made = {node: [one.outputs[0] for one in chosen] for node, chosen in found.items()}
    casts = [kinds for node, kinds in made.items() if node.target is scaled_cast]
    largest = [kinds for node, kinds in made.items() if node.target is block_max]
    assert casts == [[S(0)]] and largest == [[S(0)]]  # the first layer has no gradient of its input
    assert slice_cast_strategies(program, weight, (R,), RuleBook(RULES)).keys() == found.keys()  # nothing changes
    program, weight, kinds = seen["2.weight"]
    found = slice_cast_strategies(program, weight, kinds, RuleBook(RULES))
    assert [one[0].outputs[0] for n, one in found.items() if n.target is block_max] == [S(0), I]
    for name in ("0.bias", "3.weight"):
        program, node, kinds = seen[name]
        assert slice_cast_strategies(program, node, kinds, RuleBook(RULES)) == {}


@pytest.mark.slow
def test_slices_with_padding_and_of_a_dim_that_is_split_further_are_gathered_wide() -> None:
    seen, _, _ = _asked(_model(), {"dp": 3}, "tensorwise")
    program, weight, kinds = seen["0.weight"]
    assert kinds == (S(0, 1, 1),) and slice_cast_strategies(program, weight, kinds, RuleBook(RULES)) == {}
    seen, _, _ = _asked(_model(), {"dp": 2, "tp": 2}, "tensorwise")
    program, weight, (dp, tp) = seen["0.weight"]
    assert {dp.dim, tp.dim} == {0, 1} and slice_cast_strategies(program, weight, (dp, tp), RuleBook(RULES))
    assert slice_cast_strategies(program, weight, (tp, tp), RuleBook(RULES)) == {}


def test_8_bit_numbers_and_scales_are_known_by_their_parameter() -> None:
    _, local, _ = _asked(_model(), {"dp": 2}, "rowwise")
    of = {parameter_of(n) for n in local.graph.nodes if n.target is scaled_cast}
    assert {leaf(n).name for n in of if n is not None} == {"0.weight", "2.weight"}  # type: ignore[union-attr]
    assert None in of  # activations


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_scale_that_ranks_do_not_agree_on_is_found(recipe: str) -> None:
    given = torch.randn(8, 32), torch.randn(8, 16)
    plan = {"precision": "fp8", "fp8_recipe": recipe, "zero": 3}
    with (
        mock.patch.object(scales, "largest_over", lambda builder, found, axes: found),
        pytest.raises(CompileError, match=r"is the largest over \[\] where ranks over \['dp'\] have parts"),
    ):
        quintnet.compile(_model(), quintnet.Mesh(dp=2), given, loss_fn=F.mse_loss, plan=plan)


def test_a_scale_of_other_numbers_is_found() -> None:
    _, local, book = _asked(_model(), {"dp": 2}, "tensorwise")
    every = next(n for n in local.graph.nodes if n.target is aten.amax.default)
    every.args = (every.args[0], [1])
    with pytest.raises(CompileError, match="is no largest number of all ranks"):
        check_types(local, book)
