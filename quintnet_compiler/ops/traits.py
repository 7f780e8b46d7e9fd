"""The traits of single overloads of operators: fields of :class:`.op_spec.OpSpec` by the operators that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..ops.rank_local import LOOKUPS, dropout, embedding_rows, embedding_rows_backward, keep_mask, local_noise, noise
from .attention.operator import attention
from .attention.ring_plan import ring_plan
from .attention.tiled import tiled_attention, tiled_attention_backward
from .collectives import (
    COLLECTIVES,
    SIZED,
    STARTS,
    combine,
    convert,
    dispatch,
    dispatch_plan,
    ring_attention,
    ring_attention_backward,
    share,
    wait,
)
from .copies import WAY_OF
from .derivatives.inner_gradients import gradient, start
from .derivatives.user_derivatives import ENDS
from .experts.expert_linear import expert_linear
from .experts.grouped_rows import group_plan, group_rows, ungroup_rows
from .filled_rows import fill_rows
from .op_spec import Attention, Decomposition, Product
from .pointwise_losses import nll_loss_backward
from .rank_local import RANKED, microbatch

aten = torch.ops.aten
CONVOLUTIONS = (
    aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding,
    aten.conv2d.padding, aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)  # fmt: skip
_KERNELS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
)  # fmt: skip
_BACKWARD_KERNELS = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
_FLAGS: Mapping[str, Iterable[Any]] = {
    "casts": [aten._to_copy.default],
    "converts": [convert],
    "cuts_microbatch": [microbatch],
    "shares": [share],
    "by_expert": [expert_linear],
    "unpadded": [
        aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, fill_rows, aten.histc.default,
    ],
    "adds": [aten.add.Tensor],
    "reshapes": [aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default],
    "slices": [aten.slice.Tensor],
    "joins": [aten.cat.default],
    "relayouts": [aten.contiguous.default],
    "clones": [aten.clone.default],
    "aliases": [aten.alias.default],  # traces below autograd have it for detach since torch 2.14
    "new_memory": [
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
        aten.add.Tensor, aten.sum.dim_IntList, aten.sum.default, aten.embedding.default,
        aten.embedding_dense_backward.default, embedding_rows, embedding_rows_backward,
    ],
    "contiguous": [
        aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding.default,
        aten.native_layer_norm.default,
    ],
    "plans_ring": [ring_plan],
    "looks_up": LOOKUPS,
    "finds": [aten.where.default, aten.nonzero_numpy.default, aten.nonzero.default],
    "convolves": CONVOLUTIONS,
    "reads_result_size": [
        aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default,
        aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, embedding_rows,
    ],
    # layer_norm_kernel.cu of PyTorch; RMS norms share it
    "reads_twice": [aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default],
    "slice_gradient": [aten.slice_backward.default],
    "takes_strides": [
        aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default,
        aten.as_strided_copy.default,
    ],
    "overwrites": [aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default],
    "keeps_zero": [
        aten.gelu.default, aten.silu.default, aten.relu.default, aten.tanh.default, aten.square.default,
        aten.mul.Tensor, aten._to_copy.default,
    ],
    "adds_at_indices": [aten.index_add.default, aten.scatter_add.default],
    "under_way": STARTS.values(),
    "waits": [wait],
    "on_rank": RANKED,
    "takes_size": SIZED,
}  # fmt: skip
_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "consists_of": {aten.nll_loss_backward.default: Decomposition(nll_loss_backward)},
    "user_derivative": ENDS,
    "routing": {
        dispatch_plan: "plan", **dict.fromkeys((dispatch, STARTS[dispatch]), "dispatch"),
        **dict.fromkeys((combine, STARTS[combine]), "combine"),
        group_plan: "group plan", group_rows: "group", ungroup_rows: "ungroup",
    },
    "random": {dropout: "mask", keep_mask: "mask", noise: "numbers", local_noise: "numbers"},
    "splits": {aten.split_with_sizes.default: "sizes", aten.unbind.int: "each"},
    "product": {
        aten.linear.default: Product(bias=2, transposed=True),
        aten.mm.default: Product(),
        aten.addmm.default: Product(rows=1, weight=2, bias=0),
        aten.matmul.default: Product(weight_dims=None),
        aten.bmm.default: Product(weight_dims=3),
    },
    "permutes": {aten.t.default: "two", aten.transpose.int: "two", aten.permute.default: "any"},
    "detaches": {aten.detach.default: "of its own", aten.detach_.default: "in place"},
    "attention": {
        aten.scaled_dot_product_attention.default: Attention(of_models=True),
        attention: Attention(of_models=True, masked=True),
        tiled_attention: Attention(positions="tiles", masked=True),
        tiled_attention_backward: Attention(positions="tiles", masked=True, backward=True),
        ring_attention: Attention(positions="ring", masked=True),
        ring_attention_backward: Attention(positions="ring", masked=True, backward=True),
        **dict.fromkeys(_KERNELS, Attention(fused=True)),
        **dict.fromkeys(_BACKWARD_KERNELS, Attention(fused=True, backward=True)),
    },
    "shape_only": {
        **dict.fromkeys(
            [aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
             aten.new_zeros.default, aten.new_ones.default, aten.new_full.default], 0,
        ),
        **dict.fromkeys([aten.nll_loss_backward.default, aten.nll_loss2d_backward.default], 1),
    },
    "inner_gradient": {start: "start", gradient: "gradient"},
    "reduces": {
        **dict.fromkeys([aten.sum.default, aten.sum.dim_IntList], "sum"),
        **dict.fromkeys([aten.count_nonzero.default, aten.count_nonzero.dim_IntList], "sum"),
        **dict.fromkeys([aten.mean.default, aten.mean.dim], "mean"),
        aten.histc.default: "bins",
    },
    "averages": {
        **dict.fromkeys(
            [aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default],
            "labels",
        ),
        **dict.fromkeys(
            [aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
             aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
             aten.soft_margin_loss.default, aten.hinge_embedding_loss.default, aten.margin_ranking_loss.default,
             aten.poisson_nll_loss.default], "elements",
        ),
        **dict.fromkeys(
            [aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default, aten.multi_margin_loss.default,
             aten.multilabel_margin_loss.default], "rows",
        ),
    },
    "collective": {
        target: each for each in COLLECTIVES.values() for target in filter(None, (each.op, each.start))
    },
    "way": WAY_OF,
    "start": STARTS,
    "transpose": {
        **{each.op: each.transpose for each in COLLECTIVES.values() if each.transpose is not None},
        group_rows: ungroup_rows,
        ungroup_rows: group_rows,
    },
}  # fmt: skip


def _by_operator() -> dict[Any, dict[str, Any]]:
    traits: dict[Any, dict[str, Any]] = {}
    flags = {field: dict.fromkeys(targets, True) for field, targets in _FLAGS.items()}
    for field, values in (*flags.items(), *_VALUES.items()):
        for target, value in values.items():
            traits.setdefault(target, {})[field] = value
    return traits


TRAITS: Mapping[Any, Mapping[str, Any]] = MappingProxyType(_by_operator())
