"""Operators that pass gradients to ``comm`` from compiled code. None of them waits for another rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...ops.define import define_operator


def handle(comm: Any, values: Sequence[str]) -> Tensor:
    """Return an empty tensor that stands for ``comm``: compiled code takes only tensors and constants.

    ``values``: the names of the gradients that the code passes, by their number in the code; with numbers instead of
    names, equal blocks have equal code.
    """
    tensor = torch.empty(0)
    vars(tensor)["gradients"] = comm, values
    return tensor


def _accumulate(target: Tensor, gradient: Tensor, number: int) -> None:
    comm, values = vars(target)["gradients"]
    comm.accumulate(gradient, values[number])


def _accumulate_matmul(target: Tensor, left: Tensor, right: Tensor, number: int) -> None:
    comm, values = vars(target)["gradients"]
    comm.accumulate_matmul(left, right, values[number])


def _nothing(*_: Any) -> None:
    return None


# They are declared to write into ``to``, so their order is kept: a bucket's last gradient starts its reduction.
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
"""The operators by the name of the method of ``comm`` that they call."""
