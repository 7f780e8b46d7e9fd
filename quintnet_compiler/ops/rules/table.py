"""The table: one line per operator. See :mod:`.notation` for how to read and add lines."""
# ruff: noqa: E501  one line per entry

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ...compat.torch import OLD_CHOLESKY
from ...core.annotations import is_float, tensor_inputs, value
from ..attention.operator import attention
from ..cross_entropy import row_nll
from ..ctc import ctc_rows
from ..derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ..experts.expert_linear import expert_linear
from ..filled_rows import alike, fill_rows
from ..filters_of_rows import grouped_convolution, grouped_convolution_weight
from ..rank_local import dropout, noise
from ..traits import CONVOLUTIONS
from . import contractions as c
from . import lookups as look
from . import reductions as red
from . import user_derivatives as own
from . import views as v
from .backward_operators import BACKWARD_RULES
from .node_factors import along, leading, opaque, rows
from .notation import Factors, Rule, SpecFn, Work, rule, table

aten = torch.ops.aten


def _each(targets: Iterable[Any], factors: SpecFn, work: Work, shape_arg: int | None = None) -> list[Rule]:
    return [Rule(target, factors, shape_arg, work=work) for target in targets]


def _elementwise(targets: Iterable[Any], inputs: int = 1, *, linear: Sequence[Sequence[int]] = ()) -> list[Rule]:
    """Return rules of operators of up to ``inputs`` tensors that broadcast."""
    text = ", ".join(["..."] * inputs) + " -> ..."
    return [rule(target, text, linear=linear) for target in targets]


def _rows(targets: Iterable[Any], text: str) -> list[Rule]:
    """Return rules of operators that work on each row of the leading dims on its own."""
    return _each(targets, rows(text), "memory")


_CAST = rule(aten._to_copy.default, "... -> ...")
_EXACT_CAST = rule(aten._to_copy.default, "... -> ...", linear=[[0]])


def _cast(node: fx.Node) -> Factors:
    """Let a partial sum pass through a cast that loses nothing; a narrowing one would round each term."""
    source, result = value(tensor_inputs(node)[0]), value(node)
    widens = torch.promote_types(source.dtype, result.dtype) == result.dtype
    exact = widens and (is_float(source) or not is_float(result) or result.dtype.itemsize >= 4)
    return (_EXACT_CAST if exact else _CAST).factors(node)


_TABLE = (
    table(
        # elementwise, not linear
        _elementwise(
            [
                aten.relu.default, aten.relu6.default, aten.gelu.default, aten.silu.default, aten.mish.default,
                aten.elu.default, aten.selu.default, aten.celu.default, aten.leaky_relu.default, aten.tanh.default,
                aten.sigmoid.default, aten.log_sigmoid.default, aten.hardtanh.default, aten.hardsigmoid.default,
                aten.hardshrink.default, aten.softshrink.default, aten.threshold.default,
                aten.exp.default, aten.exp2.default, aten.expm1.default, aten.log.default, aten.log2.default,
                aten.log10.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default, aten.square.default,
                aten.reciprocal.default, aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.logit.default,
                aten.sin.default, aten.cos.default, aten.tan.default, aten.asin.default, aten.acos.default,
                aten.atan.default, aten.sinh.default, aten.cosh.default, aten.asinh.default, aten.acosh.default,
                aten.atanh.default, aten.sinc.default, aten.erf.default, aten.erfc.default, aten.erfinv.default,
                aten.lgamma.default, aten.digamma.default, aten.i0.default, aten.abs.default, aten.sign.default,
                aten.sgn.default, aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default,
                aten.frac.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
                aten.nan_to_num.default, aten.isnan.default, aten.isinf.default, aten.isfinite.default,
                aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.remainder.Scalar, aten.fmod.Scalar,
                aten.div.Scalar_mode, aten.xlogy.Scalar_Other, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar,
                aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.bitwise_not.default, aten.logical_not.default,
                aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar, aten.fill.Scalar, aten.zeros_like.default,
                aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar,
                aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
                aten.polygamma.default, aten.round.decimals, aten.signbit.default, aten.angle.default,
                aten.special_erfcx.default, aten.special_i0e.default, aten.special_i1.default,
                aten.special_i1e.default, aten.special_log_ndtr.default, aten.special_ndtri.default, aten.special_entr.default,
            ]
        ),
        _elementwise(
            [
                aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
                aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor,
                aten.logical_and.default, aten.logical_or.default,
                aten.logical_xor.default, aten.maximum.default, aten.minimum.default, aten.fmax.default,
                aten.fmin.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.pow.Tensor_Tensor,
                aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default, aten.div.Tensor_mode,
                aten.atan2.default, aten.hypot.default, aten.copysign.Tensor, aten.logaddexp.default,
                aten.xlogy.Tensor, aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf,
                aten.where.Scalar, aten.fill.Tensor, aten._prelu_kernel.default, aten.polar.default, aten.complex.default,
                aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor, aten.gcd.default, aten.lcm.default,
                aten.nextafter.default, aten.igamma.default, aten.igammac.default, aten.special_zeta.default,
                aten.special_xlog1py.default, aten.logaddexp2.default,
            ],
            2,
        ),
        _elementwise([aten.clamp.Tensor, aten.masked_fill.Tensor], 3),
        rule(aten.frexp.Tensor, "... -> ..., ..."),
        _each([aten.prelu.default], red.prelu, "memory"),
        # elementwise, linear
        _elementwise(
            [
                aten.neg.default, aten._conj_physical.default, aten.mul.Scalar, aten.div.Scalar, aten.deg2rad.default, aten.rad2deg.default,
            ],
            linear=[[0]],
        ),
        _elementwise([aten.add.Tensor, aten.sub.Tensor, aten.lerp.Scalar], 2, linear=[[0, 1]]),
        _elementwise([aten.mul.Tensor], 2, linear=[[0], [1]]),
        _elementwise([aten.div.Tensor, aten.true_divide.Tensor], 2, linear=[[0]]),
        _elementwise([aten.where.self], 3, linear=[[1, 2]]),
        _elementwise([aten.lerp.Tensor], 3, linear=[[0, 1]]),
        _each([aten._to_copy.default], _cast, "memory"),
        rule(dropout, "... -> ...", linear=[[0]]),  # a mask is the same on every layout
        rule(aten.native_dropout_backward.default, "..., ... -> ...", linear=[[0]]),
        # contractions
        rule(aten.linear.default, "... i, o i, o -> ... o", additive=[2]),
        rule(aten.bilinear.default, "... i, ... j, o i j, o -> ... o", additive=[3]),
        rule(aten.mv.default, "m k, k -> m", linear=[[0], [1]]),
        rule(aten.dot.default, "k, k -> ", linear=[[0], [1]]),
        rule(aten.outer.default, "m, n -> m n", linear=[[0], [1]]),
        _each([aten.addmm.default], c.added("m k, k n -> m n"), "matmul"),
        _each([aten.addmv.default], c.added("m k, k -> m"), "matmul"),
        _each([aten.baddbmm.default], c.added("b m k, b k n -> b m n"), "matmul"),
        _each([aten.addbmm.default], c.added("b m k, b k n -> m n"), "matmul"),
        _each([aten.matmul.default, aten.mm.default, aten.bmm.default], c.matmul, "matmul"),
        _each([aten.einsum.default], c.einsum, "matmul"),
        _each(
            CONVOLUTIONS,
            c.convolution,
            "matmul",
        ),
        _each([grouped_convolution], c.grouped_convolution, "matmul"),
        _each([grouped_convolution_weight], c.grouped_convolution_weight, "matmul"),
        _each([aten.scaled_dot_product_attention.default], c.attention, "attention"),
        _each([attention], c.masked_attention, "attention"),
        rule(aten.cdist.default, "... p k, ... r k -> ... p r", whole="k", work="matmul"),
        rule(aten._cdist_forward.default, "... p k, ... r k -> ... p r", whole="k", work="matmul"),
        rule(
            aten._cdist_backward.default, "... p r, ... p k, ... r k, ... p r -> ... p k",
            whole="k", linear=[[0]], work="matmul",
        ),
        # each matrix on its own
        _rows(
            [
                aten.linalg_inv.default, aten.linalg_cholesky.default, *OLD_CHOLESKY,
                aten.cholesky_inverse.default, aten.linalg_matrix_exp.default, aten.matrix_exp.default,
            ],
            "... m n -> ... p q",
        ),
        _rows([aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default], "... m n -> ... p q, ..."),
        _rows([aten.linalg_det.default], "... m n -> ..."),
        _rows([aten.linalg_slogdet.default], "... m n -> ..., ..."),
        _rows([aten._linalg_slogdet.default], "... m n -> ..., ..., ... p q, ... k"),
        _rows([aten.linalg_eigvalsh.default, aten.linalg_svdvals.default], "... m n -> ... k"),
        _rows([aten.linalg_eigh.default, aten.linalg_eig.default], "... m n -> ... k, ... p q"),
        _rows([aten.linalg_qr.default], "... m n -> ... p q, ... r s"),
        _rows([aten.linalg_svd.default, aten._linalg_svd.default], "... m n -> ... p q, ... k, ... r s"),
        _rows([aten.linalg_lu.default], "... m n -> ... p q, ... r s, ... t u"),
        _rows([aten.linalg_lu_factor.default], "... m n -> ... p q, ... k"),
        _rows([aten.linalg_lu_factor_ex.default], "... m n -> ... p q, ... k, ..."),
        _rows([aten.lu_unpack.default], "... m n, ... k -> ... p q, ... r s, ... t u"),
        _rows([aten.ormqr.default], "... m n, ... k, ... p q -> ... r s"),
        _each([aten.linalg_lu_solve.default], c.lu_solve, "memory"),
        _rows([aten.cholesky_solve.default], "... m n, ... p q -> ... r s"),
        _rows([aten.triangular_solve.default], "... m n, ... p q -> ... r s, ... t u"),
        _rows([aten._linalg_solve_ex.default], "... m n, ... p q -> ... r s, ... t u, ... k, ..."),
        _rows([aten.linalg_householder_product.default], "... m n, ... k -> ... p q"),
        _rows([aten.linalg_pinv.atol_rtol_tensor], "... m n, ..., ... -> ... p q"),
        _each([aten.linalg_solve.default, aten.linalg_solve_triangular.default], c.solve, "memory"),
        # Fourier transforms
        _each([aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default], along(linear=True), "memory"),
        # views
        rule(aten.detach.default, "... -> ...", linear=[[0]], work="view"),
        _each([aten.reshape.default], v.reshape, "view"),
        _each([aten.expand.default], v.expand, "view", shape_arg=1),
        _each([aten.permute.default, aten.transpose.int, aten.t.default], v.permute, "view"),
        _each([aten.slice.Tensor], along(linear=True), "view"),
        _each([aten.diff.default], along(linear=True), "memory"),
        _each([aten.flip.default, aten.roll.default], along("dims", linear=True), "memory"),
        _each([aten.select.int, aten.unbind.int], v.select, "view"),
        _each([aten.diagonal.default], v.diagonal, "view"),
        _each([aten.diagonal_scatter.default], v.diagonal_scatter, "memory"),
        _each([aten.unfold.default], v.unfold, "view"),
        _each([aten.cat.default], v.cat, "memory"),
        _each([aten.stack.default], v.stack, "memory"),
        _each([aten.split_with_sizes.default], v.split, "view"),
        _each([aten.repeat_interleave.self_int], v.repeat_interleave, "memory"),
        _each([aten.constant_pad_nd.default, aten.pad.default], v.pad, "memory"),
        _each([aten.select_scatter.default, aten.slice_scatter.default], v.scatter_view, "memory"),
        _each([aten.triu.default, aten.tril.default], leading(-2, linear=True), "memory"),
        _each([aten.col2im.default], leading(-2, linear=True), "memory"),
        _each(
            [
                aten.im2col.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
                aten.channel_shuffle.default,
            ],
            leading(-3, linear=True),
            "memory",
        ),
        # reductions
        _each(
            [aten.sum.default, aten.sum.dim_IntList],  # a mean becomes a sum, see Normalize
            red.reduction(sums=True, linear=True),
            "memory",
        ),
        _each([aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList], red.reduction(sums=True), "memory"),
        _each(
            [
                aten.amax.default, aten.amin.default, aten.aminmax.default, aten.max.default, aten.min.default,
                aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.any.default,
                aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default,
                aten.prod.dim_int, aten.logsumexp.default, aten.var.correction, aten.var.dim,
                aten.std.correction, aten.std.dim, aten.var_mean.correction, aten.std_mean.correction,
                aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default,
                aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim,
            ],
            red.reduction(),
            "memory",
        ),
        # along a dim
        _each([aten.cumsum.default], along(linear=True), "memory"),
        _each(
            [
                aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default, aten._softmax.default,
                aten._log_softmax.default, aten._softmax_backward_data.default,
                aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
                aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.glu.default,
            ],
            along(),
            "memory",
        ),
        # norms and pooling
        _each([aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default], red.norm_last, "memory"),
        _each([aten.group_norm.default], leading(1), "memory"),
        _each([aten.instance_norm.default], red.instance_norm, "memory"),
        _each([aten.renorm.default], red.renorm, "memory"),
        _each([aten._weight_norm.default], red.weight_norm, "memory"),
        _each(
            [aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit.no_stats],
            red.batch_norm,
            "memory",
        ),
        _each(
            [
                aten.max_pool1d.default, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default,
                aten.adaptive_max_pool1d.default, aten.upsample_nearest1d.vec, aten.upsample_linear1d.vec,
            ],
            leading(-1),
            "memory",
        ),
        _each(
            [
                aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default,
                aten.adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default, aten.upsample_nearest2d.vec,
                aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec,
                aten._upsample_bicubic2d_aa.vec,
            ],
            leading(-2),
            "memory",
        ),
        _each(
            [
                aten.max_pool3d.default, aten.max_pool3d_with_indices.default, aten.avg_pool3d.default,
                aten.adaptive_avg_pool3d.default, aten.adaptive_max_pool3d.default, aten.upsample_nearest3d.vec, aten.upsample_trilinear3d.vec,
            ],
            leading(-3),
            "memory",
        ),
        _rows([aten.max_unpool2d.default], "... h w, ... p q -> ... r s"),
        _rows([aten.max_unpool3d.default], "... d h w, ... o p q -> ... r s t"),
        _rows([aten.fractional_max_pool2d.default], "... h w, ... k -> ... p q, ... r s"),
        _rows([aten.fractional_max_pool3d.default], "... d h w, ... k -> ... o p q, ... r s t"),
        # lookups
        _each([aten.embedding.default], look.embedding, "memory"),
        _each([row_nll], look.row_nll, "memory"),
        rule(ctc_rows, "t n c, n s, n, n -> n, n u a", whole="t c s u a", work="memory"),
        _each([expert_linear], look.expert_linear, "matmul"),
        _each([aten.nll_loss_forward.default, aten.nll_loss2d_forward.default], look.label_loss, "memory"),
        _each([aten.index.Tensor, aten._unsafe_index.Tensor], look.index, "memory"),
        _each([aten.index_select.default], look.index_select, "memory"),
        _each([aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_reduce.default], look.index_add, "memory"),
        _each([aten.gather.default], look.gather, "memory"),
        _each([aten.scatter.value, aten.scatter.src, aten.scatter_add.default, aten.scatter_reduce.two], look.scatter, "memory"),
        _each([aten.take.default, aten.index_put.default, aten.masked_scatter.default, aten.isin.Tensor_Tensor, aten.embedding_bag.padding_idx, alike], opaque, "memory"),
        _each([fill_rows], look.fill_rows, "memory"),
        _each([aten.histc.default], look.histc, "memory"),
        rule(aten.view_as_complex.default, "... part -> ...", whole="part", work="view"),
        rule(aten.view_as_real.default, "... -> ... part", whole="part", work="view"),
        rule(aten.one_hot.default, "... -> ... c", whole="c", work="memory"),
        _each([aten.searchsorted.Tensor], look.searchsorted, "memory"),
        rule(aten.bucketize.Tensor, "..., n -> ...", whole="n", work="memory"),
        rule(aten.grid_sampler.default, "n c h w, n p q xy -> n c p q", whole="h w xy", work="memory"),
        rule(aten.grid_sampler_2d.default, "n c h w, n p q xy -> n c p q", whole="h w xy", work="memory"),
        BACKWARD_RULES,
        rule(aten.grid_sampler_3d.default, "n c d h w, n p q r xyz -> n c p q r", whole="d h w xyz", work="memory"),
        _rows([aten.multilabel_margin_loss_forward.default], "... c, ... k -> ..., ... p"),
        # whole on every rank: they read all of their inputs
        _each(
            [
                aten.linalg_tensorinv.default, aten.linalg_tensorsolve.default, aten.dist.default, aten.pdist.default,
                aten.put.default, aten._unsafe_masked_index.default, aten._unsafe_masked_index_put_accumulate.default,
                aten.native_group_norm.default, aten._batch_norm_with_update_functional.default,
            ],
            opaque,
            "memory",
        ),
        # derivatives that the user wrote
        _each([with_tangent], own.with_tangent, "view"),
        _each([declare_gradient], own.declare_gradient, "view"),
        _each([after_gradients], own.after_gradients, "view"),
        # constants
        _each(
            [aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default],
            v.factory,
            "memory",
            shape_arg=1,
        ),
        _each(
            [aten.ones.default, aten.zeros.default, aten.full.default, aten.empty.memory_format, noise],
            v.factory,
            "memory",
            shape_arg=0,
        ),
        _each(
            [
                aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default,
                aten.hann_window.default, aten.hann_window.periodic, aten.hamming_window.default,
                aten.hamming_window.periodic, aten.bartlett_window.default, aten.bartlett_window.periodic,
                aten.blackman_window.default, aten.blackman_window.periodic, aten.kaiser_window.default,
                aten.kaiser_window.periodic, aten.kaiser_window.beta,
                aten.eye.default, aten.eye.m, aten.triu_indices.default, aten.tril_indices.default, aten.scalar_tensor.default,
            ],
            opaque,
            "memory",
        ),
    )
)  # fmt: skip
RULES = MappingProxyType(_TABLE)


def add_rules(rules: Iterable[Rule]) -> None:
    """Add the rules of a feature's operators to the table.

    Raises:
        ValueError: if an operator has one already.
    """
    added = table(rules)
    if repeated := added.keys() & RULES.keys():
        raise ValueError(f"two rules for {', '.join(map(str, repeated))}")
    _TABLE.update(added)
