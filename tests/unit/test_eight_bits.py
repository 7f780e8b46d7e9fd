"""The pass that makes linear layers products of 8-bit numbers, its check, and the largest number that ranks have."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import quintnet
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.sharding import I, S
from quintnet_compiler.driver.compiler import Runner
from quintnet_compiler.features.fp8.checks.eight_bits import check_eight_bits
from quintnet_compiler.features.fp8.eight_bits import RECIPES, EightBits, kept_wide
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, scaled_cast, scaled_matmul
from quintnet_compiler.features.fp8.scales import largest_of_ranks
from quintnet_compiler.ir.program import Axis
from quintnet_compiler.ops.collectives import convert

from .graphs import builder, leaf


def _programs() -> tuple[Any, Any]:
    seen: dict[str, Any] = {}

    def keep(runner: Runner, check: Any, *arguments: Any) -> None:
        if check is check_eight_bits:
            seen.update(before=arguments[0], after=arguments[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 16))
    batch = torch.randn(4, 16), torch.randn(4, 16)
    with mock.patch.object(Runner, "check", keep):
        quintnet.compile(model, quintnet.Mesh(), batch, loss_fn=F.mse_loss, precision="fp8")
    return seen["before"], seen["after"]


def _first(graph: fx.Graph, target: Any, *, last: str = "") -> fx.Node:
    return next(n for n in graph.nodes if n.target is target and (not last or last in map(str, n.args)))


def _other_weight(graph: fx.Graph) -> None:
    one, other = [n for n in graph.nodes if n.target is scaled_matmul and "mk,nk->mn" in n.args][:2]
    other.args = (other.args[0], one.args[1], other.args[2], one.args[3], *other.args[4:])


def _other_scale(graph: fx.Graph) -> None:
    casts = [n for n in graph.nodes if n.target is scaled_cast]
    casts[1].args = (casts[1].args[0], casts[0].args[1], casts[1].args[2])


def _scale_of_another(graph: fx.Graph) -> None:
    one, other = [n for n in graph.nodes if n.target is block_max][:2]
    other.args = (one.args[0], other.args[1])


def _gradients_swapped(graph: fx.Graph) -> None:
    node = _first(graph, scaled_matmul, last="mn,mk->nk")
    node.args = (node.args[1], node.args[0], node.args[3], node.args[2], *node.args[4:])


def _a_gradient_is_lost(graph: fx.Graph) -> None:
    node = _first(graph, torch.ops.quintnet.after_gradients.default)
    node.args = (node.args[0], node.args[1][:-1])


def _scales_of_another_kind(graph: fx.Graph) -> None:
    node = _first(graph, scaled_matmul)
    node.args = (*node.args[:6], True)


MISTAKES = [
    _other_weight, _other_scale, _scale_of_another, _gradients_swapped, _a_gradient_is_lost, _scales_of_another_kind,
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("mutate", MISTAKES)
def test_a_mistake_is_found(mutate: Any) -> None:
    before, after = _programs()
    check_eight_bits(before, after)
    mutate(after.graph)
    with pytest.raises(CompileError, match="8-bit check"):
        check_eight_bits(before, after)


def test_the_pass_alone() -> None:
    before, _ = _programs()
    after = EightBits(RECIPES["rowwise"], wide=("1",))(before)
    names = [n for n in after.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(names) == 2 == len(kept_wide(before, RECIPES["rowwise"], ("1",)))
    check_eight_bits(before, after)


def test_a_pattern_that_names_nothing_is_refused() -> None:
    before, _ = _programs()
    with pytest.raises(CompileError, match=r"fp8_skip: '1\.wieght' matches no parameter") as found:
        EightBits(RECIPES["rowwise"], wide=("1.wieght",))(before)
    assert found.value.code == "QN204" and "did you mean 1.weight" in str(found.value)


def test_ranks_gather_the_largest_of_their_blocks() -> None:
    axes = Axis("dp", 2, "data"), Axis("microbatches", 2, "time"), Axis("tp", 4, "model")
    to = builder()
    largest_of_ranks(to, leaf(to, "input", "x", 4, 8), [0, 0], (S(0), S(0), S(1)), axes)
    assert [node.args[1] for node in to.made if node.target is convert] == ["tp", "dp"]  # microbatches have their own
    to = builder()
    largest_of_ranks(to, leaf(to, "input", "x", 4, 8), [1, 0], (S(0), S(0), I), axes)
    assert [node.target for node in to.made] == [block_max]
