"""The table: one line per operator. See :mod:`.rule_notation` for how to read and add lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..annotations import tensor_inputs, value
from . import view_rules as v
from .rule_notation import Factors, Rule, SpecFn, rule, table

aten = torch.ops.aten


def _each(targets: Iterable[Any], factors: SpecFn, shape_arg: int | None = None) -> list[Rule]:
    return [Rule(target, factors, shape_arg) for target in targets]


def _elementwise(targets: Iterable[Any], inputs: int = 1, *, linear: Sequence[Sequence[int]] = ()) -> list[Rule]:
    text = ", ".join(["..."] * inputs) + " -> ..."
    return [rule(target, text, linear=linear) for target in targets]


def _cast(node: fx.Node) -> Factors:
    """A partial sum may pass through a cast that loses nothing; a narrowing one would round each term."""
    widens = torch.promote_types(value(tensor_inputs(node)[0]).dtype, value(node).dtype) == value(node).dtype
    return rule(node.target, "... -> ...", linear=[[0]] if widens else []).factors(node)


RULES = MappingProxyType(
    table(
        # elementwise, not linear
        _elementwise(
            [
                aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default,
                aten.exp.default, aten.log.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default,
                aten.square.default, aten.sin.default, aten.cos.default, aten.abs.default, aten.sign.default,
                aten.erf.default, aten.reciprocal.default, aten.floor.default, aten.round.default,
                aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.leaky_relu.default, aten.elu.default,
                aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
                aten.softplus.default, aten.mish.default, aten.log_sigmoid_forward.default,
                aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.remainder.Scalar,
                aten.floor_divide.default, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar,
                aten.gt.Scalar, aten.ge.Scalar, aten.bitwise_not.default, aten.logical_not.default,
                aten.isnan.default, aten.isinf.default, aten.zeros_like.default, aten.ones_like.default,
                aten.full_like.default, aten.empty_like.default, aten.triu.default, aten.tril.default,
            ]
        ),
        _each([aten.triu.default, aten.tril.default], v.opaque),
        _elementwise(
            [
                aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
                aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.logical_and.default, aten.logical_or.default,
                aten.__and__.Tensor, aten.__or__.Tensor, aten.pow.Tensor_Tensor, aten.maximum.default,
                aten.minimum.default, aten.remainder.Tensor,
            ],
            2,
        ),
        # elementwise, linear
        _elementwise([aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.detach.default, aten.clone.default], linear=[[0]]),
        _elementwise([aten.add.Tensor, aten.sub.Tensor], 2, linear=[[0, 1]]),
        _elementwise([aten.mul.Tensor], 2, linear=[[0], [1]]),
        _elementwise([aten.div.Tensor], 2, linear=[[0]]),
        _elementwise([aten.masked_fill.Scalar], 2),
        _elementwise([aten.where.self], 3, linear=[[1, 2]]),
        _elementwise([aten.where.ScalarOther, aten.where.ScalarSelf], 2),
        _each([aten._to_copy.default], _cast),
        # contractions
        rule(aten.linear.default, "... i, o i, o -> ... o", linear=[], additive=[2]),
        rule(aten.addmm.default, "n, m k, k n -> m n", additive=[0]),
        _each([aten.matmul.default, aten.mm.default, aten.bmm.default], v.matmul),
        _each([aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default], v.convolution),
        _each([aten.scaled_dot_product_attention.default], v.attention),
        # views
        _each([aten.reshape.default, aten.view.default, aten._unsafe_view.default], v.reshape, shape_arg=1),
        _each([aten.expand.default], v.expand, shape_arg=1),
        _each([aten.permute.default, aten.transpose.int, aten.t.default], v.permute),
        _each([aten.slice.Tensor], v.slice_),
        _each([aten.select.int], v.select),
        _each([aten.cat.default], v.cat),
        _each([aten.stack.default], v.stack),
        _each([aten.split_with_sizes.default], v.split),
        _each([aten.constant_pad_nd.default, aten.pad.default], v.pad),
        _each([aten.flip.default], v.opaque),
        # reductions
        _each([aten.sum.default, aten.sum.dim_IntList], v.reduce_sum),
        _each([aten.mean.default, aten.mean.dim], v.reduce_mean),
        _each(
            [
                aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.any.default,
                aten.all.default, aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default,
                aten.max.dim, aten.min.dim, aten.logsumexp.default, aten.var.correction,
                aten.std.correction, aten.prod.default,
            ],
            v.reduce_other,
        ),
        _each([aten.cumsum.default, aten.cumprod.default], v.scan),
        _each([aten.topk.default, aten.sort.default], v.topk),
        # normalization and softmax
        _each([aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default], v.along_dim),
        _each([aten.layer_norm.default, aten.rms_norm.default], v.norm_last),
        _each([aten.group_norm.default, aten.instance_norm.default], v.leading(1)),
        _each(
            [
                aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
                aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.max_pool1d.default,
                aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.upsample_nearest2d.vec,
            ],
            v.leading(2),
        ),
        # lookups
        rule(aten.embedding.default, "v e, ... -> ... e", linear=[[0]], contiguous="v"),
        rule(aten.nll_loss_forward.default, "n v, n, v -> n, ", whole="v"),
        _each([aten.index.Tensor], v.index),
        _each([aten.gather.default], v.gather),
        # constants
        _each([aten.new_ones.default, aten.new_zeros.default, aten.new_full.default], v.factory, shape_arg=1),
        _each([aten.ones.default, aten.zeros.default, aten.full.default, aten.empty.memory_format], v.factory, shape_arg=0),
        _each([aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default, aten.diff.default], v.opaque),
    )
)  # fmt: skip
