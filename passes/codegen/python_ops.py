"""Which Python function to call for an ATen operator in generated code.

``torch.mul`` takes its arguments in C++; ``torch.ops.aten.mul.Tensor`` goes through the dispatcher's generic (boxed)
call, which takes about a microsecond longer: as long as the rest of a small operator. Only functions that take the
very same positional arguments are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from ...compat.torch import gelu, linear, silu
from ...compat.torch_codegen import SHIPPED, is_as_shipped

aten = torch.ops.aten

SPELLING: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.add.Tensor: SHIPPED.add,
        aten.add.Scalar: SHIPPED.add,
        aten.sub.Tensor: SHIPPED.sub,
        aten.sub.Scalar: SHIPPED.sub,
        aten.mul.Tensor: SHIPPED.mul,
        aten.mul.Scalar: SHIPPED.mul,
        aten.div.Tensor: SHIPPED.div,
        aten.div.Scalar: SHIPPED.div,
        aten.neg.default: SHIPPED.neg,
        aten.rsqrt.default: SHIPPED.rsqrt,
        aten.pow.Tensor_Scalar: SHIPPED.pow,
        aten.tanh.default: SHIPPED.tanh,
        aten.sigmoid.default: SHIPPED.sigmoid,
        aten.relu.default: SHIPPED.relu,
        aten.exp.default: SHIPPED.exp,
        aten.log.default: SHIPPED.log,
        aten.sqrt.default: SHIPPED.sqrt,
        aten.cos.default: SHIPPED.cos,
        aten.sin.default: SHIPPED.sin,
        aten.eq.Scalar: SHIPPED.eq,
        aten.eq.Tensor: SHIPPED.eq,
        aten.ne.Scalar: SHIPPED.ne,
        aten.ne.Tensor: SHIPPED.ne,
        aten.ge.Scalar: SHIPPED.ge,
        aten.ge.Tensor: SHIPPED.ge,
        aten.gt.Scalar: SHIPPED.gt,
        aten.gt.Tensor: SHIPPED.gt,
        aten.le.Scalar: SHIPPED.le,
        aten.le.Tensor: SHIPPED.le,
        aten.lt.Scalar: SHIPPED.lt,
        aten.lt.Tensor: SHIPPED.lt,
        aten.logical_and.default: SHIPPED.logical_and,
        aten.logical_or.default: SHIPPED.logical_or,
        aten.logical_not.default: SHIPPED.logical_not,
        aten.mm.default: SHIPPED.mm,
        aten.bmm.default: SHIPPED.bmm,
        aten.addmm.default: SHIPPED.addmm,
        aten.matmul.default: SHIPPED.matmul,
        aten.linear.default: linear,
        aten.silu.default: silu,
        aten.gelu.default: gelu,
        aten.detach.default: SHIPPED.detach,
        aten.t.default: SHIPPED.t,
        aten.transpose.int: SHIPPED.transpose,
        aten.permute.default: SHIPPED.permute,
        aten.reshape.default: SHIPPED.reshape,
        aten.split_with_sizes.default: SHIPPED.split_with_sizes,
        aten.unsqueeze.default: SHIPPED.unsqueeze,
        aten.squeeze.dim: SHIPPED.squeeze,
        aten.select.int: SHIPPED.select,
        aten.cat.default: SHIPPED.cat,
        aten.sum.default: SHIPPED.sum,
        aten.sum.dim_IntList: SHIPPED.sum,
        aten.mean.dim: SHIPPED.mean,
        aten.amax.default: SHIPPED.amax,
        aten.any.dim: SHIPPED.any,
        aten.native_layer_norm.default: SHIPPED.native_layer_norm,
        aten.embedding.default: SHIPPED.embedding,
        aten.where.self: SHIPPED.where,
        aten.masked_fill.Scalar: SHIPPED.masked_fill,
    }
)


def spelled(target: Any) -> Any:
    """Return what generated code calls for an operator: the operator itself, where somebody replaced the function."""
    function = SPELLING.get(target, target)
    return function if is_as_shipped(function) else target
