"""Operators of one's own that no rule splits: each is refused with its line, and what the refusal offers works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quintnet

from .frontier import refused, trains_equally
from .table_of_errors import Net, X, Y, double

MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}


@torch.library.triton_op("table_of_errors::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


triple.register_autograd(lambda ctx, gradient: gradient * 3)


def _tripled(m: Any, x: Tensor) -> Tensor:
    return m.o(triple(m.q(x)))  # type: ignore[no-any-return]


def _doubled(m: Any, x: Tensor) -> Tensor:
    return m.o(double(m.q(x)))  # type: ignore[no-any-return]


OPERATORS = {"triton_op": (_tripled, triple), "custom_op": (_doubled, double)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", OPERATORS)
def test_an_operator_without_a_rule(kind: str) -> None:
    body, operator = OPERATORS[kind]
    name = str(operator._name).rpartition("::")[2]
    cause = rf"(?s)table_of_errors.{name}.default has no sharding rule.*at: .*return m.o\({name}\(.*unknown_ops"
    refused(lambda: Net(body), (X, Y), "QN202", cause=cause, loss_fn=F.cross_entropy, meshes=MESHES)
    trains_equally(lambda: Net(body), (X, Y), F.cross_entropy, MESHES, plan={"unknown_ops": "replicate"})
    rule = quintnet.rule(operator, "b t0d1 -> b t1d1", whole="t0d1 t1d1")
    trains_equally(lambda: Net(body), (X, Y), F.cross_entropy, MESHES, rules=[rule])
