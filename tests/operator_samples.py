"""Calls of every operator that has a sharding rule: a few shapes each, small enough to split in every way.

Sizes are multiples of 2 and 3 so that axes of 2 and 3 ranks divide them, some several times over (cuts inside a
factor). Among the samples of an operator there are broadcasting, negative dims, ``keepdim`` and unbatched shapes
wherever it knows them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from quintnet_compiler.compat.torch import OLD_CHOLESKY
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.cross_entropy import row_nll
from quintnet_compiler.ops.ctc import ctc_rows
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.filled_rows import alike, fill_rows
from quintnet_compiler.ops.filters_of_rows import grouped_convolution, grouped_convolution_weight

from .one_operator import Input, Sample, call

aten = torch.ops.aten


# -- arguments


def _normal(dice: Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=dice, dtype=torch.float64)


def f(*shape: int) -> Input:
    """Normal values in float64, with a gradient."""
    return Input(shape, _normal)


def const(*shape: int) -> Input:
    """As :func:`f`, without a gradient."""
    return Input(shape, _normal, grad=False)


def cplx(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.complex(*(torch.randn(s, generator=g, dtype=torch.float64) for _ in "ab")))


def pos(*shape: int) -> Input:
    """Values between 0.1 and 0.9."""
    return Input(shape, lambda g, s: torch.rand(s, generator=g, dtype=torch.float64) * 0.8 + 0.1)


def spd(*shape: int) -> Input:
    """Symmetric matrices whose eigenvalues are positive and apart."""

    def draw(dice: Generator, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=dice, dtype=torch.float64) * 0.1
        return x @ x.mT + torch.diag(torch.arange(1, shape[-1] + 1, dtype=torch.float64))

    return Input(shape, draw)


def ints(high: int, *shape: int) -> Input:
    """Integers from 0 to ``high - 1``; each occurs where there are enough of them."""

    def draw(dice: Generator, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        return (torch.randperm(max(count, high), generator=dice) % high)[:count].reshape(shape)

    return Input(shape, draw)


def bools(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.rand(s, generator=g) < 0.5)


def low(dtype: torch.dtype, *shape: int) -> Input:
    """Eighths, which every floating dtype adds up exactly."""
    return Input(shape, lambda g, s: (torch.randint(-16, 17, s, generator=g) / 8).to(dtype))


def _each(targets: Iterable[Any], *args: Any, **kwargs: Any) -> list[Sample]:
    return [call(target, *args, **kwargs) for target in targets]


# -- elementwise


def _elementwise() -> list[Sample]:
    anywhere = [
        aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default,
        aten.exp.default, aten.exp2.default, aten.expm1.default, aten.square.default, aten.sin.default,
        aten.cos.default, aten.tan.default, aten.atan.default, aten.sinh.default, aten.cosh.default,
        aten.asinh.default, aten.abs.default, aten.sign.default, aten.sgn.default, aten.erf.default,
        aten.erfc.default, aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default,
        aten.frac.default, aten.sinc.default, aten.i0.default, aten.nan_to_num.default, aten.leaky_relu.default,
        aten.elu.default, aten.celu.default, aten.selu.default, aten.hardtanh.default, aten.hardsigmoid.default,
        aten.hardshrink.default, aten.softshrink.default, aten.relu6.default,
        aten.mish.default, aten.log_sigmoid.default, aten.neg.default, aten.detach.default,
        aten.logical_not.default, aten.isnan.default, aten.isinf.default, aten.isfinite.default,
        aten.deg2rad.default, aten.rad2deg.default, aten.signbit.default, aten.angle.default,
        aten.special_erfcx.default, aten.special_i0e.default, aten.special_i1.default, aten.special_i1e.default,
        aten.special_log_ndtr.default,
    ]  # fmt: skip
    positive = [
        aten.log.default, aten.log1p.default, aten.log2.default, aten.log10.default, aten.sqrt.default,
        aten.rsqrt.default, aten.reciprocal.default, aten.asin.default, aten.acos.default, aten.atanh.default,
        aten.logit.default, aten.erfinv.default, aten.lgamma.default, aten.digamma.default, aten.special_ndtri.default,
        aten.special_entr.default,
    ]  # fmt: skip
    with_number = [
        aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.remainder.Scalar,
        aten.fmod.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar,
        aten.gt.Scalar, aten.ge.Scalar, aten.clamp_min.default, aten.clamp_max.default, aten.pow.Tensor_Scalar,
    ]  # fmt: skip
    return [
        *_each(anywhere, f(4, 6)),
        *_each(positive, pos(4, 6)),
        call(aten.acosh.default, Input((4, 6), lambda g, s: torch.rand(s, generator=g, dtype=torch.float64) + 1.5)),
        *_each(with_number, f(4, 6), 2),
        call(aten.pow.Scalar, 2, f(4, 6)),
        call(aten.polygamma.default, 1, pos(4, 6)),
        call(aten.round.decimals, f(4, 6), decimals=1),
        call(aten.threshold.default, f(4, 6), 0.1, 3.0),
        call(aten.clamp.default, f(4, 6), -0.5, 0.5),
        call(aten.bitwise_not.default, ints(8, 4, 6)),
        call(aten.bitwise_not.default, bools(4, 6)),
        *_each([aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar], ints(8, 4, 6), 5),
        *_each([aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor], ints(8, 4, 6), ints(3, 4, 6)),
        *_each([aten.gcd.default, aten.lcm.default], ints(8, 4, 6), ints(5, 6)),
        *_each([aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar], ints(8, 4, 6), 1),
        call(aten.fill.Scalar, f(4, 6), 2.0),
        call(aten.fill.Tensor, const(4, 6), f()),
        call(aten.polar.default, f(4, 6), f(4, 6)),
        call(aten.complex.default, f(4, 6), f(4, 6)),
        call(aten.view_as_complex.default, f(4, 6, 2)),
        call(aten.view_as_real.default, cplx(4, 6)),
        call(aten.ones_like.default, const(4, 6)),
        call(aten.zeros_like.default, ints(5, 4, 6)),
        call(aten.full_like.default, const(4, 6), 2.0),
        replace(call(aten.empty_like.default, const(4, 6)), compare=False),
        call(aten.div.Scalar, ints(9, 4, 6), 2),
        call(aten.neg.default, ints(9, 4, 6)),
        *[call(aten._to_copy.default, low(a, 4, 6), dtype=b) for a in FLOATS for b in FLOATS if a != b],
        call(aten._to_copy.default, bools(4, 6), dtype=torch.float64),
        call(aten._to_copy.default, ints(9, 4, 6), dtype=torch.bfloat16),
        call(aten._to_copy.default, ints(9, 4, 6), dtype=torch.float32),
        call(aten._to_copy.default, f(4, 6), dtype=torch.int64),
    ]


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PAIRS = ((f(4, 6), f(4, 6)), (f(4, 6), f(6)), (f(4, 1), f(1, 6)), (f(2, 4, 6), f(4, 1)), (f(), f(4, 6)))


def _binary() -> list[Sample]:
    any_values = [
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default,
        aten.fmax.default, aten.fmin.default, aten.atan2.default, aten.hypot.default, aten.copysign.Tensor,
        aten.logaddexp.default, aten.logaddexp2.default, aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor,
        aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.logical_and.default, aten.logical_or.default,
        aten.logical_xor.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.clamp.Tensor,
    ]  # fmt: skip
    bits = [
        aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor,
        
    ]  # fmt: skip
    divisions = [aten.div.Tensor, aten.true_divide.Tensor, aten.remainder.Tensor, aten.fmod.Tensor]
    divisions += [aten.pow.Tensor_Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default]
    special = [aten.nextafter.default, aten.igamma.default, aten.igammac.default, aten.special_zeta.default]
    return [
        *[call(target, *pair) for target in any_values for pair in PAIRS[:3]],
        *[call(aten.mul.Tensor, *pair) for pair in PAIRS[3:]],
        call(aten.add.Tensor, f(4, 6), f(6), alpha=3),
        call(aten.sub.Tensor, ints(9, 4, 6), ints(9, 6)),
        call(aten.mul.Tensor, f(4, 6), bools(6)),
        *[call(target, a, b) for target in bits for a, b in ((bools(4, 6), bools(6)), (ints(8, 4, 1), ints(8, 6)))],
        *[call(target, a, b) for target in divisions for a, b in ((pos(4, 6), pos(6)), (pos(4, 1), pos(4, 6)))],
        *[call(target, const_pos(4, 6), const_pos(6)) for target in special],
        *[call(target, const_pos(4, 6), pos(6)) for target in special[1:3]],
        call(aten.floor_divide.default, ints(9, 4, 6), 2),
        call(aten.floor_divide.default, const(4, 6), const_pos(6)),
        call(aten.div.Tensor_mode, pos(4, 6), pos(6), rounding_mode="floor"),
        call(aten.div.Scalar_mode, pos(4, 6), 0.2, rounding_mode="trunc"),
        call(aten.xlogy.Scalar_Other, pos(4, 6), 2.0),
        call(aten.masked_fill.Scalar, f(4, 6), bools(6), -1.0),
        call(aten.masked_fill.Tensor, f(4, 6), bools(4, 1), f()),
        call(aten.where.self, bools(4, 6), f(4, 6), f(4, 6)),
        call(aten.where.self, bools(4, 1), f(6), f(4, 6)),
        call(aten.where.self, bools(4, 6), ints(5, 4, 6), ints(5, 6)),
        call(aten.where.ScalarOther, bools(6), f(4, 6), 1.0),
        call(aten.where.ScalarSelf, bools(6), 1.0, f(4, 6)),
        call(aten.where.Scalar, bools(4, 6), 1.0, 0.0),
        call(aten.lerp.Scalar, f(4, 6), f(6), 0.3),
        call(aten.lerp.Tensor, f(4, 6), f(6), f(4, 1)),
        call(aten.clamp.Tensor, f(4, 6), const(6), const(4, 1)),
        call(aten.prelu.default, f(4, 6, 2), f(6)),
        call(aten.prelu.default, f(4, 6), f(1)),
        call(aten._prelu_kernel.default, f(4, 6, 2), f(1, 6, 1)),
    ]


# -- contractions


def _contractions() -> list[Sample]:
    return [
        call(aten.linear.default, f(4, 6), f(12, 6), f(12)),
        call(aten.linear.default, f(2, 4, 6), f(12, 6)),
        call(aten.linear.default, f(6), f(4, 6), f(4)),
        call(aten.addmm.default, f(6), f(4, 12), f(12, 6)),
        call(aten.addmm.default, f(4, 6), f(4, 12), f(12, 6), beta=2, alpha=3),
        call(aten.addmm.default, f(4, 1), f(4, 12), f(12, 6)),
        call(aten.baddbmm.default, f(4, 4, 6), f(4, 4, 12), f(4, 12, 6)),
        call(aten.baddbmm.default, f(4, 6), f(4, 4, 12), f(4, 12, 6), alpha=2),
        call(aten.addbmm.default, f(4, 6), f(4, 4, 12), f(4, 12, 6)),
        call(aten.addmv.default, f(4), f(4, 12), f(12)),
        call(aten.mv.default, f(4, 12), f(12)),
        call(aten.dot.default, f(12), f(12)),
        call(aten.outer.default, f(4), f(6)),
        call(aten.mm.default, f(4, 12), f(12, 6)),
        call(aten.bmm.default, f(2, 4, 12), f(2, 12, 6)),
        call(aten.matmul.default, f(2, 4, 6), f(2, 6, 4)),
        call(aten.matmul.default, f(2, 1, 4, 6), f(4, 6, 2)),
        call(aten.matmul.default, f(2, 4, 6), f(6)),
        call(aten.matmul.default, f(6), f(2, 6, 4)),
        call(aten.matmul.default, f(12), f(12)),
        call(aten.matmul.default, ints(5, 4, 6), ints(5, 6, 4)),
        call(aten.bilinear.default, f(4, 6), f(4, 2), f(4, 6, 2), f(4)),
        call(aten.einsum.default, "bse,bte,e->bst", [f(2, 4, 6), f(2, 6, 6), f(6)]),
        call(aten.einsum.default, "...ij,jk", [f(2, 4, 6), f(6, 4)]),
        call(aten.einsum.default, "bii->bi", [f(2, 4, 4)]),
        *_convolutions(),
        *_attention(),
    ]


def _convolutions() -> list[Sample]:
    ones = ([1, 1], [1, 1], [1, 1])
    samples = [
        call(aten.conv1d.default, f(4, 6, 5), f(4, 6, 3), f(4)),
        call(aten.conv1d.default, f(4, 5), f(6, 4, 3), f(6)),
        call(aten.conv1d.padding, f(4, 6, 5), f(4, 6, 3), f(4), [1], "same"),
        call(aten.conv2d.default, f(4, 6, 4, 4), f(4, 6, 3, 3), f(4), [1, 1], [1, 1]),
        call(aten.conv2d.default, f(2, 4, 4, 4), f(6, 4, 2, 2), None, [2, 2]),
        call(aten.conv2d.default, f(4, 4, 4), f(6, 4, 1, 1), f(6)),
        call(aten.conv2d.default, f(2, 6, 4, 4), f(6, 2, 1, 1), f(6), [1, 1], [0, 0], [1, 1], 3),
        call(aten.conv2d.default, f(2, 6, 4, 4), f(6, 1, 1, 1), None, [1, 1], [0, 0], [1, 1], 6),
        call(aten.conv2d.padding, f(2, 4, 4, 4), f(6, 4, 3, 3), f(6), [1, 1], "same"),
        call(aten.conv3d.default, f(2, 4, 2, 2, 2), f(6, 4, 1, 1, 1), f(6)),
        call(aten.conv3d.padding, f(2, 4, 2, 2, 2), f(6, 4, 1, 1, 1), f(6), [1, 1, 1], "valid"),
        call(aten.convolution.default, f(2, 4, 4, 4), f(6, 4, 3, 3), f(6), *ones, False, [0, 0], 1),
        call(aten.convolution.default, f(2, 4, 4, 4), f(4, 6, 3, 3), f(6), *ones, True, [0, 0], 1),
        call(aten.convolution.default, f(2, 4, 4, 4), f(4, 2, 3, 3), f(4), *ones, True, [0, 0], 2),
        call(aten.conv_transpose1d.default, f(2, 4, 4), f(4, 6, 2), f(6), [2]),
        call(aten.conv_transpose2d.input, f(2, 4, 3, 3), f(4, 4, 2, 2), None, [2, 2]),
        call(aten.conv_transpose3d.input, f(2, 4, 2, 2, 2), f(4, 6, 1, 1, 1), f(6)),
    ]
    return samples


def _attention() -> list[Sample]:
    sdpa = aten.scaled_dot_product_attention.default
    q, k, v = f(2, 4, 6, 8), f(2, 4, 4, 8), f(2, 4, 4, 8)
    few = f(2, 2, 6, 4)
    return [
        call(sdpa, q, k, v),
        call(sdpa, f(4, 6, 8), f(4, 6, 8), f(4, 6, 4), scale=0.3),
        call(sdpa, f(2, 6, 6, 4), f(2, 6, 6, 4), f(2, 6, 6, 4), None, 0.0, True),
        call(sdpa, q, k, v, f(2, 4, 6, 4)),
        call(sdpa, q, k, v, bools(2, 1, 6, 4)),
        call(sdpa, q, k, v, const(6, 4)),
        call(sdpa, f(2, 8, 6, 4), few, few, enable_gqa=True),
        call(sdpa, f(2, 8, 6, 4), few, few, None, 0.0, True, enable_gqa=True),
        call(sdpa, f(2, 4, 6, 4), f(1, 4, 4, 4), f(2, 4, 4, 4)),
        call(sdpa, f(2, 4, 6, 4), f(2, 1, 4, 4), f(2, 1, 4, 4)),
        call(sdpa, f(4, 6), f(6, 6), f(6, 4)),
        *_masked_attention(),
    ]


def _masked_attention() -> list[Sample]:
    q, few, k, v = f(2, 4, 6, 4), f(2, 2, 6, 4), f(2, 4, 12, 4), f(2, 4, 12, 2)
    causal, whole = {"scale": 0.5, "mask": "causal"}, {"scale": 0.5, "mask": "all"}
    return [
        call(attention, q, q, q, **causal),
        call(attention, q, few, few, **causal),
        call(attention, q, k, v, **whole),
        call(attention, q, k, v, scale=0.5, mask="causal_window_3"),
        call(attention, q, few, few, scale=0.5, mask="causal_window_2_chunk_4"),
        call(attention, f(2, 4, 12, 4), k, f(2, 4, 12, 6), bools(2, 12), **whole),
        call(attention, q, few, few, bools(2, 6), **causal),  # the first queries may see nothing
        call(attention, q, few, few, None, ints(2, 2, 6), **causal),
        call(attention, q, few, few, None, None, ints(2, 2, 6), **causal),
        call(attention, q, q, q, bools(2, 6), ints(3, 2, 6), ints(2, 2, 6), scale=0.5, mask="causal_window_4"),
    ]


# -- views


def _views() -> list[Sample]:
    shapes = [
        ((4, 6), (24,)), ((24,), (4, 6)), ((2, 6, 4), (12, 4)), ((4, 12), (4, 3, 4)), ((4, 6), (6, 4)),
        ((4, 6, 2), (2, 2, 12)), ((1, 4, 6), (4, 1, 6)), ((2, 4, 6), (2, 6, 4)), ((4, 6), (2, 12)),
    ]  # fmt: skip
    return [
        *[call(aten.reshape.default, f(*before), list(after)) for before, after in shapes],
        call(aten.reshape.default, ints(5, 4, 6), [24]),
        call(aten.expand.default, f(4, 1, 6), [4, 4, 6]),
        call(aten.expand.default, f(6), [2, 4, 6]),
        call(aten.expand.default, f(), [4]),
        call(aten.permute.default, f(2, 4, 6), [2, 0, 1]),
        call(aten.permute.default, f(2, 4, 6), [0, -1, 1]),
        call(aten.transpose.int, f(2, 4, 6), 1, -1),
        call(aten.t.default, f(4, 6)),
        call(aten.t.default, f(6)),
        call(aten.slice.Tensor, f(4, 6), 1, 1, 5, 2),
        call(aten.slice.Tensor, f(4, 6), -2, 0, 2),
        call(aten.slice.Tensor, ints(5, 4, 6), 0, 0, 2),
        call(aten.select.int, f(4, 6, 2), 1, 2),
        call(aten.select.int, f(4, 6), -1, -1),
        call(aten.unbind.int, f(4, 2, 6), 1),
        call(aten.cat.default, [f(4, 6), f(4, 2)], 1),
        call(aten.cat.default, [f(4, 6), f(2, 6), f(4, 6)]),
        call(aten.cat.default, [f(4, 6), ints(3, 4, 2)], -1),
        call(aten.stack.default, [f(4, 6), f(4, 6)], 1),
        call(aten.stack.default, [f(4, 6), f(4, 6), f(4, 6)], -1),
        call(aten.split_with_sizes.default, f(2, 12), [4, 4, 4], 1),
        call(aten.split_with_sizes.default, f(4, 12), [6, 6], -1),
        call(aten.split_with_sizes.default, f(4, 6), [4, 2], 1),
        call(aten.split_with_sizes.default, f(8, 6), [4, 4]),
        call(aten.constant_pad_nd.default, f(4, 6), [1, 1]),
        call(aten.constant_pad_nd.default, f(2, 4, 6), [0, 0, 1, 0], 2.0),
        call(aten.pad.default, f(4, 6, 4), [1, 1], "reflect"),
        call(aten.pad.default, f(4, 6, 4), [1, 1], "constant", 1.5),
        call(aten.flip.default, f(4, 6), [1]),
        call(aten.flip.default, f(4, 6, 2), [0, -1]),
        call(aten.roll.default, f(4, 6), [1], [1]),
        call(aten.roll.default, f(4, 6), [1]),
        call(aten.repeat_interleave.self_int, f(4, 6), 2, 1),
        call(aten.repeat_interleave.self_int, f(4, 6), 2),
        call(aten.repeat_interleave.self_int, f(4, 6), 2, 1, output_size=12),
        call(aten.unfold.default, f(4, 6), 1, 3, 1),
        call(aten.triu.default, f(2, 4, 6)),
        call(aten.tril.default, f(4, 6), 1),
        call(aten.diff.default, f(4, 6), 1, 1),
        call(aten.diff.default, f(4, 6), 1, -1, f(4, 1)),
        call(aten.diagonal.default, f(2, 4, 4), 0, 1, 2),
        call(aten.select_scatter.default, f(4, 6), f(4), 1, 2),
        call(aten.slice_scatter.default, f(4, 6), f(4, 2), 1, 2, 4),
        call(aten.slice_scatter.default, f(4, 6), f(4, 6), 0),
        call(aten.pixel_shuffle.default, f(2, 4, 8, 2, 2), 2),
        call(aten.pixel_unshuffle.default, f(4, 4, 4), 2),
        call(aten.channel_shuffle.default, f(2, 4, 2, 2), 2),
        call(aten.im2col.default, f(4, 4, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
        call(aten.col2im.default, f(4, 4, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    ]


# -- reductions, norms, softmax


def _reductions() -> list[Sample]:
    named = [aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.logsumexp.default]
    named += [aten.var.dim, aten.std.dim, aten.nansum.default]
    one_dim = [aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim]
    one_dim += [aten.prod.dim_int, aten.median.dim, aten.mode.default]
    whole = [
        aten.sum.default, aten.max.default, aten.min.default, aten.prod.default, aten.any.default,
        aten.all.default, aten.median.default, aten.argmax.default, aten.argmin.default,
    ]  # fmt: skip
    spread = [aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction]
    minmax = const(4, 6) if torch.__version__ < (2, 12) else f(4, 6)  # torch 2.11 has no derivative of aminmax
    return [
        *_each(named, f(4, 6, 2), [1]),
        *_each([aten.var.dim, aten.std.dim], f(4, 6, 2), [1], False, True),
        *_each(named[:4], f(4, 6, 2), [0, -1], True),
        *_each(one_dim, f(4, 6, 2), 1),
        *_each(one_dim, f(4, 6, 2), -1, True),
        *_each([aten.any.dims, aten.all.dims], bools(4, 6, 2), [0, 1]),
        *_each(whole, f(4, 6)),
        call(aten.native_dropout_backward.default, f(4, 6), bools(4, 6), 1.25),
        *_each(spread, f(4, 6, 2), [1], correction=0),
        *_each(spread, f(4, 6, 2), None, keepdim=True),
        call(aten.sum.default, ints(9, 4, 6)),
        call(aten.sum.dim_IntList, bools(4, 6), [0]),
        call(aten.sum.dim_IntList, low(torch.float32, 4, 6), [0], dtype=torch.float64),
        call(aten.count_nonzero.default, bools(4, 6)),
        call(aten.count_nonzero.dim_IntList, bools(4, 6), [1]),
        call(aten.aminmax.default, minmax, dim=1),
        call(aten.aminmax.default, minmax),
        call(aten.kthvalue.default, f(4, 6), 2, 1),
        call(aten.linalg_vector_norm.default, f(4, 6), 2, [1], True),
        call(aten.linalg_vector_norm.default, f(4, 6)),
        call(aten.norm.ScalarOpt_dim, f(4, 6), 2, [-1]),
        *_each(
            [
                aten.cumsum.default,
                aten.cumprod.default,
                aten.logcumsumexp.default,
                aten.cummax.default,
                aten.cummin.default,
            ],
            f(4, 6),
            1,
        ),
        call(aten.cumsum.default, ints(9, 4, 6), -1),
        call(aten.topk.default, f(4, 6), 2),
        call(aten.topk.default, f(4, 6), 2, 0),
        call(aten.sort.default, f(4, 6)),
        call(aten.sort.default, f(4, 6), 0, True),
        call(aten.sort.stable, f(4, 6), stable=True, dim=0),
        call(aten.argsort.default, f(4, 6), 0),
        call(aten.glu.default, f(4, 6), -1),
        call(aten.softmax.int, f(4, 6, 2), 1),
        call(aten.log_softmax.int, f(4, 6), -1),
        call(aten._safe_softmax.default, f(4, 6), 1),
        call(aten._softmax.default, f(4, 6), 1, False),
        call(aten._log_softmax.default, f(4, 6), -1, False),
        call(aten.layer_norm.default, f(4, 6), [6], f(6), f(6)),
        call(aten.layer_norm.default, f(4, 2, 6), [2, 6]),
        call(aten.rms_norm.default, f(4, 6), [6], f(6)),
        call(aten.group_norm.default, f(4, 6, 4), 3, f(6), f(6)),
        call(aten.instance_norm.default, f(4, 6, 4), f(6), f(6), None, None, True, 0.1, 1e-5, False),
        call(aten.instance_norm.default, f(4, 6, 4), None, None, const(6), const_pos(6), False, 0.1, 1e-5, False),
        call(aten._weight_norm.default, f(4, 6), f(4, 1)),
        call(aten._weight_norm.default, f(4, 6), f(), -1),
        call(aten._weight_norm.default, f(4, 6, 2), f(1, 1, 2), 2),
        call(
            aten._native_batch_norm_legit_no_training.default, f(4, 6, 4), f(6), f(6), const(6), const_pos(6), 0.1, 1e-5
        ),
        call(aten._native_batch_norm_legit.no_stats, f(4, 6, 4), f(6), f(6), True, 0.1, 1e-5),
        *_pools(),
    ]


def const_pos(*shape: int) -> Input:
    return replace(pos(*shape), grad=False)


def _pools() -> list[Sample]:
    line, image, volume = f(2, 6, 4), f(2, 6, 4, 4), f(2, 4, 2, 2, 2)
    return [
        call(aten.max_pool1d.default, line, [2], [2]),
        call(aten.max_pool1d.default, f(6, 8), [2], [2]),
        call(aten.max_pool2d.default, image, [2, 2], [2, 2]),
        call(aten.max_pool2d.default, f(4, 8, 4), [2, 2], [2, 2]),
        call(aten.max_pool2d_with_indices.default, image, [2, 2], [2, 2]),
        call(aten.max_pool3d.default, volume, [2, 2, 2], [1, 1, 1]),
        call(aten.avg_pool1d.default, line, [2]),
        call(aten.avg_pool1d.default, f(6, 8), [2]),
        call(aten.avg_pool2d.default, image, [2, 2]),
        call(aten.avg_pool2d.default, f(4, 8, 4), [2, 2]),
        call(aten.avg_pool3d.default, volume, [2, 2, 2]),
        call(aten.adaptive_avg_pool1d.default, line, [2]),
        call(aten.adaptive_avg_pool2d.default, image, [1, 1]),
        call(aten.adaptive_avg_pool2d.default, f(4, 8, 4), [4, 2]),
        call(aten.adaptive_avg_pool3d.default, volume, [1, 1, 1]),
        call(aten.adaptive_max_pool1d.default, line, [2]),
        call(aten.adaptive_max_pool2d.default, image, [2, 2]),
        call(aten.upsample_nearest1d.vec, line, None, [2.0]),
        call(aten.upsample_nearest2d.vec, image, None, [2.0, 2.0]),
        call(aten.upsample_nearest3d.vec, volume, None, [2.0, 2.0, 2.0]),
        call(aten.upsample_linear1d.vec, line, None, False, [2.0]),
        call(aten.upsample_bilinear2d.vec, image, [6, 6], False, None),
        call(aten.upsample_trilinear3d.vec, volume, None, True, [2.0, 2.0, 2.0]),
        call(aten.upsample_bicubic2d.vec, image, [6, 6], False, None),
        call(aten._upsample_bilinear2d_aa.vec, image, [2, 2], False, None),
        call(aten._upsample_bicubic2d_aa.vec, image, [2, 2], False, None),
    ]


# -- lookups and constants


def _lookups() -> list[Sample]:
    return [
        call(aten.embedding.default, f(12, 4), ints(12, 4, 6)),
        call(aten.embedding.default, f(12, 4), ints(12, 6), 3),
        call(aten.embedding.default, f(6, 4), ints(6, 4, 6), -1, True),
        call(row_nll, f(4, 6), ints(6, 4), -100),
        call(row_nll, f(6, 12), ints(12, 6), 2),
        call(expert_linear, f(12, 4), ints(4, 12), f(4, 6, 4), None, False),
        call(expert_linear, f(12, 4), ints(4, 12), f(4, 6, 4), f(4, 6), False),
        call(expert_linear, f(8, 4), ints(2, 8), f(4, 4, 6), f(4, 6), True),  # experts that nobody chose
        call(expert_linear, f(7, 4), ints(6, 7), f(5, 6, 4), f(5, 6), False),  # a row of no expert
        call(aten.nll_loss_forward.default, f(4, 6), ints(6, 4), None, 0, -100),
        call(aten.nll_loss_forward.default, f(4, 6), ints(6, 4), const(6), 0, 2),
        call(aten.nll_loss_forward.default, f(4, 6), ints(6, 4), const_pos(6), 1, 2),
        call(aten.nll_loss_forward.default, f(4, 6), ints(6, 4), const_pos(6), 2, 2),
        call(aten.nll_loss_forward.default, f(6), ints(6), None, 2, -100),
        call(aten.nll_loss2d_forward.default, f(4, 6, 2, 4), ints(6, 4, 2, 4), None, 0, -100),
        call(aten.nll_loss2d_forward.default, f(4, 6, 2, 4), ints(6, 4, 2, 4), const_pos(6), 2, 1),
        call(aten.index.Tensor, f(6, 4), [ints(6, 4)]),
        call(aten.index.Tensor, f(4, 6, 2), [None, ints(6, 4, 6)]),
        call(aten.index.Tensor, f(4, 6, 2), [ints(4, 4, 1), ints(6, 6)]),
        call(aten.index.Tensor, f(4, 6, 2), [ints(4, 6), None, ints(2, 6)]),
        call(aten._unsafe_index.Tensor, f(4, 6, 2), [None, ints(6, 4)]),
        call(aten.index_select.default, f(4, 6), 1, ints(6, 4)),
        call(aten.index_select.default, f(4, 6), -2, ints(4, 6)),
        call(aten.gather.default, f(4, 6), 1, ints(6, 4, 4)),
        call(aten.gather.default, f(4, 6), -2, ints(4, 2, 6)),
        call(aten.gather.default, f(4, 6), 1, ints(6, 2, 6)),
        call(aten.take.default, f(4, 6), ints(24, 2, 4)),
        call(aten.scatter.value, f(4, 6), 1, ints(6, 4, 2), 3.0),
        call(aten.scatter.src, f(4, 6), 1, permutations(6, 4, 6), f(4, 6)),
        call(aten.scatter_add.default, f(4, 6), 1, ints(6, 4, 2), f(4, 2)),
        call(aten.scatter_add.default, f(4, 6), 0, ints(4, 2, 4), const(2, 6)),
        call(aten.scatter_add.default, f(4), 0, ints(4, 6), f(6)),
        call(aten.scatter_add.default, f(4), 0, ints(4, 4), const(6)),
        call(aten.index_add.default, f(4, 6), 1, ints(6, 2), f(4, 2)),
        call(aten.index_add.default, f(4), 0, ints(4, 6), f(6)),
        call(aten.index_add.default, ints(9, 4), 0, ints(4, 6), ints(9, 6)),
        call(aten.histc.default, const(4, 6), 5, -1.0, 1.0),
        call(aten.histc.default, const(4, 6), 5),
        call(aten.index_copy.default, f(4, 6), 1, permutations(6, 6), f(4, 6)),
        call(aten.index_fill.int_Scalar, f(4, 6), 1, ints(6, 2), 1.0),
        call(aten.index_put.default, f(4, 6), [ints(4, 2)], f(2, 6), True),
        call(aten.masked_scatter.default, f(4, 6), bools(4, 6), f(4, 6)),
        call(alike, all_of(True, 4, 6), 6),
        call(fill_rows, f(4, 6), all_of(True, 4, 6), f(4, 6)),
        call(fill_rows, f(4, 6, 2), all_of(True, 4, 6, 2), f(24, 2)),
        call(aten.one_hot.default, ints(4, 4, 6), 4),
        call(aten.bucketize.Tensor, f(4, 6), sorted_values(4)),
        call(aten.isin.Tensor_Tensor, ints(6, 4, 6), ints(6, 2)),
        call(aten.grid_sampler_2d.default, f(2, 4, 4, 4), f(2, 6, 4, 2), 0, 0, False),
        call(aten.grid_sampler.default, f(2, 4, 4, 4), f(2, 6, 4, 2), 0, 0, False),
        call(aten.index_reduce.default, f(4, 6), 1, ints(6, 2), f(4, 2), "prod"),
        call(aten.scatter_reduce.two, f(4, 6), 1, ints(6, 4, 2), f(4, 2), "amax"),
        call(aten.scatter_reduce.two, f(4, 6), 1, ints(6, 4, 2), f(4, 2), "sum"),
        call(aten.searchsorted.Tensor, sorted_values(4), f(4, 6)),
        call(aten.embedding_bag.padding_idx, f(6, 4), ints(6, 8), ints(1, 1), False, 0, False, None, False, -1),
        call(aten.renorm.default, f(4, 6), 2, 0, 1.0),
        *_each(
            [
                aten.linalg_inv.default,
                aten.linalg_inv_ex.default,
                aten.linalg_det.default,
                aten.linalg_slogdet.default,
                aten.linalg_cholesky.default,
                aten.linalg_cholesky_ex.default,
                aten.linalg_eigh.default,
                aten.linalg_eigvalsh.default,
                aten.linalg_qr.default,
                aten.linalg_svdvals.default,
                aten.linalg_matrix_exp.default,
                aten.matrix_exp.default,
            ],
            spd(4, 3, 3),
        ),
        *_each([aten.linalg_svd.default, aten._linalg_svd.default], spd(4, 3, 3), False),
        *_each([*OLD_CHOLESKY, aten.cholesky_inverse.default], spd(4, 3, 3)),
        call(aten.cholesky_inverse.default, spd(3, 3)),
        call(aten._linalg_slogdet.default, spd(4, 3, 3)),
        call(aten.linalg_eig.default, replace(spd(4, 3, 3), grad=False)),
        *_each([aten.linalg_lu.default, aten.linalg_lu_factor.default, aten.linalg_lu_factor_ex.default], spd(4, 3, 3)),
        call(aten.lu_unpack.default, spd(4, 3, 3), pivots(4, 3)),
        call(aten.linalg_lu_solve.default, spd(4, 3, 3), pivots(4, 3), f(4, 3, 2)),
        call(aten.linalg_lu_solve.default, spd(3, 3), pivots(3), f(4, 3, 2)),
        call(aten.linalg_lu_solve.default, spd(3, 3), pivots(3), f(4, 3), left=False),
        call(aten.ormqr.default, f(4, 3, 2), f(4, 2), f(4, 3, 2)),
        call(aten.triangular_solve.default, f(4, 3, 2), spd(4, 3, 3)),
        call(aten.triangular_solve.default, f(4, 4, 2), spd(4, 4)),  # one matrix for all
        call(aten._linalg_solve_ex.default, spd(4, 3, 3), f(4, 3, 2)),
        call(aten._linalg_solve_ex.default, spd(4, 4, 4), f(4, 4)),  # a vector for each matrix
        call(aten._linalg_solve_ex.default, spd(4, 4, 4), f(4, 2)),  # one matrix of right-hand sides for all
        call(aten.linalg_pinv.atol_rtol_tensor, spd(4, 3, 3), atol=const_pos(4)),
        call(aten.linalg_pinv.atol_rtol_tensor, spd(4, 3, 3), atol=const_pos(4), rtol=const_pos()),
        call(aten.linalg_tensorinv.default, spd(4, 4), ind=1),
        call(aten.linalg_tensorsolve.default, spd(4, 4), f(4)),
        call(aten.cholesky_solve.default, f(4, 3, 2), spd(4, 3, 3)),
        call(aten.cholesky_solve.default, f(4, 4, 2), spd(4, 4)),
        call(aten.linalg_householder_product.default, f(4, 3, 2), f(4, 2)),
        call(aten.linalg_solve.default, spd(4, 3, 3), f(4, 3, 2)),
        call(aten.linalg_solve.default, spd(3, 3), f(3, 4), left=True),
        call(aten.linalg_solve.default, spd(3, 3), f(4, 3), left=False),
        call(aten.linalg_solve_triangular.default, spd(4, 3, 3), f(4, 3, 2), upper=True),
        call(aten._fft_r2c.default, f(4, 6), [1], 0, True),
        call(aten._fft_c2c.default, cplx(4, 6), [1], 0, True),
        call(aten._fft_c2r.default, cplx(4, 4), [1], 0, 6),
        call(aten.max_unpool2d.default, f(2, 4, 2, 2), ints(4, 2, 4, 2, 2), [4, 4]),
        call(aten.max_unpool3d.default, f(2, 4, 2, 2, 2), ints(8, 2, 4, 2, 2, 2), [2, 4, 4], [1, 2, 2], [0, 0, 0]),
        call(aten.fractional_max_pool2d.default, f(2, 4, 4, 4), [2, 2], [2, 2], replace(pos(2, 4, 2), grad=False)),
        call(aten.fractional_max_pool2d.default, f(4, 4, 4), [2, 2], [2, 2], replace(pos(1, 4, 2), grad=False)),
        call(
            aten.fractional_max_pool3d.default,
            f(2, 4, 4, 4, 4),
            [2, 2, 2],
            [2, 2, 2],
            replace(pos(2, 4, 3), grad=False),
        ),
        call(
            aten.max_pool2d_with_indices_backward.default,
            f(2, 4, 2, 2),
            const(2, 4, 4, 4),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            ints(16, 2, 4, 2, 2),
        ),
        call(aten.adaptive_max_pool3d.default, f(2, 4, 2, 4, 4), [1, 2, 2]),
        call(aten.max_pool3d_with_indices.default, f(2, 4, 2, 4, 4), [2, 2, 2]),
        call(aten._softmax_backward_data.default, f(4, 6), pos(4, 6), -1, torch.float64),
        call(aten._softmax_backward_data.default, f(4, 6), pos(4, 6), 0, torch.float64),
        call(aten.nanmedian.default, f(4, 6)),
        call(aten.nanmedian.dim, f(4, 6), 1),
        call(aten.nanmedian.dim, f(4, 6), 0, True),
        call(aten.native_layer_norm.default, f(4, 6), [6], f(6), f(6), 1e-5),
        call(aten.native_layer_norm.default, f(4, 2, 6), [2, 6], None, None, 1e-5),
        call(aten.native_group_norm.default, f(4, 4, 2), f(4), f(4), 4, 4, 2, 2, 1e-5),
        call(aten._batch_norm_with_update_functional.default, f(4, 6), f(6), f(6), const(6), const_pos(6), 0.1, 1e-5),
        call(aten.diagonal_scatter.default, f(4, 6), f(4)),
        call(aten.diagonal_scatter.default, f(2, 4, 4), f(2, 3), 1, 1, 2),
        call(aten._conj_physical.default, cplx(4, 6)),
        call(aten.frexp.Tensor, f(4, 6)),
        call(aten.grid_sampler_3d.default, f(2, 4, 2, 2, 4), f(2, 6, 4, 2, 3), 0, 0, False),
        call(aten.multilabel_margin_loss_forward.default, f(4, 6), ints(6, 4, 6), 0),
        call(aten.multilabel_margin_loss_forward.default, f(6), ints(6, 6), 0),
        call(aten.multilabel_margin_loss_forward.default, f(4, 6), ints(6, 4, 6), 2),
        call(ctc_rows, log_probs(6, 4, 3), all_of(1, 4, 2), all_of(6, 4), all_of(2, 4), 0, False),
        call(grouped_convolution, f(2, 4, 2, 6), f(4, 6, 2, 3), [2], [1], [1], False, [0]),
        call(grouped_convolution, f(1, 4, 2, 4, 6), f(4, 2, 6, 3, 2), [1, 2], [0, 1], [1, 1], True, [0, 1]),
        call(grouped_convolution_weight, f(2, 4, 6, 3), f(2, 4, 2, 6), const(4, 6, 2, 3), [2], [1], [1], False, [0]),
        call(aten.dist.default, f(4, 6), f(4, 6)),
        call(aten.pdist.default, f(4, 6)),
        call(aten.put.default, f(4, 6), permutations(24, 4), f(4)),
        call(aten._unsafe_masked_index.default, const(4, 6), bools(2), [ints(4, 2), ints(6, 2)], 0),
        call(
            aten._unsafe_masked_index_put_accumulate.default, const(4, 6), bools(2), [ints(4, 2), ints(6, 2)], const(2)
        ),
        call(aten.cdist.default, f(2, 4, 6), f(2, 6, 6)),
        call(aten._cdist_forward.default, const(2, 4, 6), const(2, 6, 6), 2.0, None),
        call(aten._cdist_backward.default, const(2, 4, 6), const(2, 4, 6), const(2, 6, 6), 2.0, const(2, 4, 6)),
    ]


def permutations(high: int, *shape: int) -> Input:
    """Indices without repeats along the last dim, so that the order of writing does not matter."""
    return Input(shape, lambda g, s: torch.rand((*s[:-1], high), generator=g).argsort(-1)[..., : s[-1]])


def pivots(*shape: int) -> Input:
    """Which row each row of a matrix changes places with, counted from 1: none."""
    return Input(shape, lambda g, s: torch.arange(1, s[-1] + 1, dtype=torch.int32).expand(s).contiguous())


def log_probs(*shape: int) -> Input:
    return Input(shape, lambda g, s: torch.randn(s, generator=g, dtype=torch.float64).log_softmax(-1))


def all_of(number: int, *shape: int) -> Input:
    return Input(shape, lambda g, s: torch.full(s, number))


def sorted_values(count: int) -> Input:
    return Input((count,), lambda g, s: torch.randn(s, generator=g, dtype=torch.float64).sort()[0], grad=False)


_WINDOWS = (
    aten.hann_window.default, aten.hamming_window.default, aten.bartlett_window.default, aten.blackman_window.default,
    aten.kaiser_window.default,
)  # fmt: skip
_PERIODIC_WINDOWS = (
    aten.hann_window.periodic, aten.hamming_window.periodic, aten.bartlett_window.periodic,
    aten.blackman_window.periodic, aten.kaiser_window.periodic,
)  # fmt: skip


def _constants() -> list[Sample]:
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    return [
        call(aten.new_ones.default, const(4, 2), [4, 6]),
        call(aten.new_zeros.default, const(), [4, 6]),
        call(aten.new_full.default, const(4), [4, 6], 3.0),
        replace(call(aten.new_empty.default, const(4), [4, 6]), compare=False),
        call(aten.ones.default, [4, 6], **kind),
        call(aten.zeros.default, [4, 6], **kind),
        call(aten.full.default, [4, 6], 2.0, **kind),
        replace(call(aten.empty.memory_format, [4, 6], **kind), compare=False),
        call(aten.arange.default, 6, **kind),
        call(aten.arange.start, 2, 8, **kind),
        call(aten.arange.start_step, 2, 8, 3, **kind),
        call(aten.linspace.default, 0, 1, 6, **kind),
        call(aten.eye.default, 4, **kind),
        call(aten.eye.m, 4, 6, **kind),
        *(call(window, 6, **kind) for window in _WINDOWS),
        *(call(window, 6, False, **kind) for window in _PERIODIC_WINDOWS),
        call(aten.kaiser_window.beta, 6, False, 8.0, **kind),
        call(aten.triu_indices.default, 4, 4),
        call(aten.tril_indices.default, 4, 4),
        call(aten.scalar_tensor.default, 2.0, **kind),
    ]


def by_target(samples: Iterable[Sample]) -> dict[Any, list[Sample]]:
    found: dict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.target].append(sample)
    return dict(found)


def _backwards() -> Iterable[Sample]:
    """Operators that autograd uses in a backward: gradient first."""
    plain = (
        aten.tanh_backward, aten.sigmoid_backward, aten.silu_backward, aten.mish_backward, aten.gelu_backward,
        aten.hardswish_backward, aten.hardsigmoid_backward, aten.logit_backward,
    )  # fmt: skip
    # PyTorch has no derivative of these: in a second derivative, it computes the first by other operators
    last = (aten.silu_backward, aten.mish_backward, aten.hardsigmoid_backward, aten.logit_backward)
    for packet in plain:
        first = const if packet in last else f
        second = replace(pos(4, 6), grad=False) if packet is aten.logit_backward else const(4, 6)
        yield call(packet.default, first(4, 6), second)
    yield call(aten.tanh_backward.default, f(4, 6), f(4, 6))
    yield call(aten.threshold_backward.default, f(4, 6), const(4, 6), 0)
    yield call(aten.leaky_relu_backward.default, f(4, 6), const(4, 6), 0.2, False)
    yield call(aten.elu_backward.default, f(4, 6), 1.0, 1.0, 1.0, False, const(4, 6))
    yield call(aten.hardtanh_backward.default, f(4, 6), const(4, 6), -1.0, 1.0)
    yield call(aten.softplus_backward.default, f(4, 6), f(4, 6), 1.0, 20.0)
    yield call(aten.softshrink_backward.default, f(4, 6), const(4, 6), 0.5)
    yield call(aten.hardshrink_backward.default, f(4, 6), const(4, 6), 0.5)
    flags = (False, True, None)
    yield call(aten.avg_pool2d_backward.default, f(4, 2, 2, 2), const(4, 2, 4, 4), [2, 2], [2, 2], [0, 0], *flags)
    yield call(aten._adaptive_avg_pool2d_backward.default, f(4, 2, 2, 2), const(4, 2, 4, 4))
    places = ints(4, 4, 2, 2, 2)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    yield call(aten.max_pool2d_with_indices_backward.default, f(4, 2, 2, 2), const(4, 2, 4, 4), *window, places)
    yield call(aten.contiguous.default, f(4, 6))
    yield call(aten.diagonal_scatter.default, f(4, 4), f(4))


ELEMENTWISE = by_target([*_elementwise(), *_binary()])
SAMPLES = ELEMENTWISE | by_target(
    [*_contractions(), *_views(), *_reductions(), *_lookups(), *_constants(), *_backwards()]
)
