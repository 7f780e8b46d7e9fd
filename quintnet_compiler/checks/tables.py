"""Conversions, spellings and dtypes as the checks expect them, written down a second time.

The passes derive these things from a few general functions. Here they are spelled out case by case, from the paper
definition of the types (see :mod:`..core.sharding`), and no pass reads them: a wrong line on either side is a
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..compat.torch import OpOverload, nn_functions, operator_name
from ..compat.torch_codegen import SHIPPED
from ..core.precision import Precision
from ..core.sharding import AxisType, I, P, R, Shard
from ..ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_state,
    reduce_scatter,
    shard_pad,
    shard_slice,
    share,
)

Call = tuple[OpOverload, tuple[int, ...]]  # a collective, and its arguments for dims

# (source, target): what a conversion does to a value, and its transpose to the gradient. None: the bits stay.
# A replicated value's gradient is a term on each rank, a partial value's gradient is the same on all.
CONVERSIONS: Mapping[tuple[str, str], tuple[OpOverload | None, OpOverload | None]] = MappingProxyType(
    {
        ("I", "I"): (None, None),
        ("I", "R"): (None, all_reduce),
        ("I", "P"): (share, None),
        ("I", "S"): (shard_slice, all_gather),
        ("R", "I"): (None, share),
        ("R", "R"): (None, None),
        ("R", "P"): (share, share),
        ("R", "S"): (shard_slice, shard_pad),
        ("P", "I"): (all_reduce, None),
        ("P", "R"): (all_reduce, all_reduce),
        ("P", "P"): (None, None),
        ("P", "S"): (reduce_scatter, all_gather),
        ("S", "I"): (all_gather, shard_slice),
        ("S", "R"): (all_gather, reduce_scatter),
        ("S", "P"): (shard_pad, shard_slice),
        ("S", "S"): (all_to_all, all_to_all),
    }
)
SUMS = frozenset({all_reduce, reduce_scatter})

# operators that generated code calls through a function of torch with the same name and the same positional arguments
_TORCH = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "rsqrt", "pow", "tanh", "sigmoid", "relu", "exp", "mm", "bmm", "addmm",
        "matmul", "t", "transpose", "permute", "reshape", "split_with_sizes", "select", "cat", "sum", "mean",
        "native_layer_norm", "embedding", "where", "masked_fill", "log", "sqrt", "cos", "sin", "eq", "ne", "ge", "gt",
        "le", "lt", "logical_and", "logical_or", "logical_not", "detach", "unsqueeze", "squeeze", "amax", "any",
    }
)  # fmt: skip
_NN = frozenset({"linear", "silu", "gelu"})


def forward_call(source: AxisType, target: AxisType, *, stored: bool) -> Call | None:
    """Return the communication that carries a value from one type to another.

    Args:
        source: the type that the value has.
        target: the type that it gets.
        stored: whether the value is a rank's slice of a parameter.
    """
    op = CONVERSIONS[_letter(source), _letter(target)][0]
    if op is None or source == target:
        return None
    return gather_state if stored and op is all_gather else op, _dims(source, target)


def backward_call(source: AxisType, target: AxisType) -> Call | None:
    """Return the communication that carries back the gradient of a value that went from ``source`` to ``target``."""
    op = CONVERSIONS[_letter(source), _letter(target)][1]
    return None if op is None or source == target else (op, _dims(target, source))


def _letter(kind: AxisType) -> str:
    return "S" if isinstance(kind, Shard) else {I: "I", R: "R", P: "P"}[kind]


def _dims(source: AxisType, target: AxisType) -> tuple[int, ...]:
    return tuple(n for kind in (source, target) if isinstance(kind, Shard) for n in (kind.dim, kind.parts))


def bare(kind: AxisType, grad: bool) -> AxisType:
    """Return ``kind``, with I for R where the value has no gradient: the two are the same then."""
    return I if kind is R and not grad else kind


def spellings(target: Any) -> tuple[Any, ...]:
    """Return the functions that generated code may call for an operator of the graph."""
    name = operator_name(target) if isinstance(target, OpOverload) and target.namespace == "aten" else ""
    home = SHIPPED if name in _TORCH else nn_functions if name in _NN else None
    return (target,) if home is None else (target, getattr(home, name))


def dtype_of_sum(precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks add up values of ``dtype``."""
    return torch.promote_types(dtype, precision.sums or dtype)


def dtypes_of_gradient(precision: Precision, held: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which microbatches, and ranks, add up the gradient of a parameter of dtype ``held``."""
    wide = torch.promote_types(held, precision.reduce or held)
    return wide, torch.bfloat16 if precision.reduce is torch.bfloat16 else wide


def rounds(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast between floating dtypes loses digits or range."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    old, new = torch.finfo(source), torch.finfo(target)
    return new.eps > old.eps or new.max < old.max
