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

aten = torch.ops.aten

SPELLING: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.add.Tensor: torch.add,
        aten.add.Scalar: torch.add,
        aten.sub.Tensor: torch.sub,
        aten.sub.Scalar: torch.sub,
        aten.mul.Tensor: torch.mul,
        aten.mul.Scalar: torch.mul,
        aten.div.Tensor: torch.div,
        aten.div.Scalar: torch.div,
        aten.neg.default: torch.neg,
        aten.rsqrt.default: torch.rsqrt,
        aten.pow.Tensor_Scalar: torch.pow,
        aten.tanh.default: torch.tanh,
        aten.sigmoid.default: torch.sigmoid,
        aten.relu.default: torch.relu,
        aten.exp.default: torch.exp,
        aten.log.default: torch.log,
        aten.sqrt.default: torch.sqrt,
        aten.cos.default: torch.cos,
        aten.sin.default: torch.sin,
        aten.eq.Scalar: torch.eq,
        aten.eq.Tensor: torch.eq,
        aten.ne.Scalar: torch.ne,
        aten.ne.Tensor: torch.ne,
        aten.ge.Scalar: torch.ge,
        aten.ge.Tensor: torch.ge,
        aten.gt.Scalar: torch.gt,
        aten.gt.Tensor: torch.gt,
        aten.le.Scalar: torch.le,
        aten.le.Tensor: torch.le,
        aten.lt.Scalar: torch.lt,
        aten.lt.Tensor: torch.lt,
        aten.logical_and.default: torch.logical_and,
        aten.logical_or.default: torch.logical_or,
        aten.logical_not.default: torch.logical_not,
        aten.mm.default: torch.mm,
        aten.bmm.default: torch.bmm,
        aten.addmm.default: torch.addmm,
        aten.matmul.default: torch.matmul,
        aten.linear.default: linear,
        aten.silu.default: silu,
        aten.gelu.default: gelu,
        aten.detach.default: torch.detach,
        aten.t.default: torch.t,
        aten.transpose.int: torch.transpose,
        aten.permute.default: torch.permute,
        aten.reshape.default: torch.reshape,
        aten.split_with_sizes.default: torch.split_with_sizes,
        aten.unsqueeze.default: torch.unsqueeze,
        aten.squeeze.dim: torch.squeeze,
        aten.select.int: torch.select,
        aten.cat.default: torch.cat,
        aten.sum.default: torch.sum,
        aten.sum.dim_IntList: torch.sum,
        aten.mean.dim: torch.mean,
        aten.amax.default: torch.amax,
        aten.any.dim: torch.any,
        aten.native_layer_norm.default: torch.native_layer_norm,
        aten.embedding.default: torch.embedding,
        aten.where.self: torch.where,
        aten.masked_fill.Scalar: torch.masked_fill,
    }
)
