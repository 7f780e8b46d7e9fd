"""Operators that hand gradients over: calls of ``comm`` that compiled code can make. No rank waits in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...ops.define import define_operator


def handle(comm: Any, values: Sequence[str]) -> Tensor:
    """A tensor in place of ``comm``, for compiled code passes on nothing but tensors and constants. ``values``: the
    names of the gradients that code hands over, which it knows by number, so that equal blocks have equal code."""
    made = torch.empty(0)
    vars(made)["gradients"] = comm, values
    return made


def _accumulate(to: Tensor, gradient: Tensor, number: int) -> None:
    comm, values = vars(to)["gradients"]
    comm.accumulate(gradient, values[number])


def _accumulate_matmul(to: Tensor, left: Tensor, right: Tensor, number: int) -> None:
    comm, values = vars(to)["gradients"]
    comm.accumulate_matmul(left, right, values[number])


def _nothing(*_: Any) -> None:
    return None


# They write into ``to``, so they stay in order: with the last gradient of a bucket, ranks begin to add it up.
OPERATORS: Mapping[str, Any] = MappingProxyType(
    {
        "accumulate": define_operator("accumulate(Tensor(a!) to, Tensor x, int number) -> ()", _nothing, _accumulate),
        "accumulate_matmul": define_operator(
            "accumulate_matmul(Tensor(a!) to, Tensor left, Tensor right, int number) -> ()",
            _nothing,
            _accumulate_matmul,
        ),
    }
)
"""By the name of the method of ``comm`` that it calls."""
