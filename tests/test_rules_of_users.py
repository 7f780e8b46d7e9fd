"""Rules of operators that users define: whatever names the operator, and what an error without a rule says to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])


@torch.library.custom_op("quintnet_rules::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda context, gradient: gradient / 2)


@torch.library.triton_op("quintnet_rules::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x * 2 + 1


shifted.register_autograd(lambda context, gradient: gradient * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(halved(torch.tanh(self.first(x))))
        return made


NAMES: dict[str, Any] = {
    "operator": torch.ops.quintnet_rules.halved.default,
    "packet": torch.ops.quintnet_rules.halved,
    "object": halved,
    "name": "quintnet_rules::halved",
    "name of the overload": "quintnet_rules::halved.default",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_is_that_of_the_operator_whatever_names_it(name: str) -> None:
    rule = quintnet.rule(NAMES[name], "b n -> b n")
    assert rule.target is torch.ops.quintnet_rules.halved.default
    train_as_plain(Net().double(), "dp2", [(X, Y)], F.cross_entropy, rules=[rule])


class Shifted(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(shifted(self.first(x)))
        return out


def test_a_triton_op_is_one_operator_with_a_rule() -> None:
    train_as_plain(Shifted().double(), "tp2", [(X, Y)], F.cross_entropy, rules=[quintnet.rule(shifted, "b n -> b n")])


def test_what_names_no_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="no operator 'quintnet_rules::nothing'"):
        quintnet.rule("quintnet_rules::nothing", "b n -> b n")
    with pytest.raises(ValueError, match=r"has the overloads .*: name one of them, aten.add.Tensor"):
        quintnet.rule(torch.ops.aten.add, "b n, b n -> b n")
    for other in ("halved", lambda x: x):
        with pytest.raises(ValueError, match=r"which is no operator: write torch.ops.lib.op.default"):
            quintnet.compile(
                Net().double(), Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy, rules=[quintnet.rule(other, "b n -> b n")]
            )


def test_the_fix_of_an_operator_without_a_rule_works_as_printed() -> None:
    with pytest.raises(quintnet.QuintNetError, match="QN202") as refusal:
        quintnet.compile(Net().double(), Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy, microbatches=2)
    fix = refusal.value.fix or ""
    assert fix.startswith("if it computes each row on its own: rules=[quintnet.rule(")
    rules = eval(fix.partition("rules=")[2], {"quintnet": quintnet})
    for layout in ("dp2", "pp2"):
        train_as_plain(Net().double(), layout, [(X, Y)], F.cross_entropy, rules=rules)


def test_the_fix_without_microbatches_is_to_run_it_unsplit() -> None:
    with pytest.raises(quintnet.QuintNetError, match="QN202") as refusal:
        quintnet.compile(Net().double(), Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    assert refusal.value.fix == 'run it unsplit: plan={"unknown_ops": "replicate"}'
    train_as_plain(Net().double(), "dp2", [(X, Y)], F.cross_entropy, microbatches=1, unknown_ops="replicate")
