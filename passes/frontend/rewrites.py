"""Canonical forms of operators: of several equal ones, the one that later passes know."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...compat.torch import operator_name
from ...core.absent_gpu import call_fake
from ...core.annotations import is_float, shape, value
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder
from ...ops.attention.operator import attention
from ...ops.rank_local import dropout
from .attention_rewrites import masked_attention, scaled_dot_product
from .bag_rewrites import embedding_bag
from .convolution_rewrites import CONVOLUTIONS, convolution
from .counted.rows import CountedRows
from .derivative_rewrites import DERIVATIVE_REWRITES
from .list_rewrites import cat
from .loss_rewrites import cross_entropy, distance, divergence, many_labels, mean, nll, output_dtype
from .norm_rewrites import emit_batch_norm, emit_instance_norm
from .random_rewrites import RANDOM_REWRITES, Rewrite, random_calls
from .stride_rewrites import as_strided, as_strided_scatter

aten = torch.ops.aten


def _identity(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    source: fx.Node = args[0]
    return source


def _reshape(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit any view that only regroups dims as reshape (strides differ on each rank anyway)."""
    others, other_kwargs = fx.map_arg((args[1:], kwargs), value)
    with builder.mode:
        contiguous = call_fake(aten.contiguous.default, (value(args[0]),), {})
        new_shape = call_fake(node.target, (contiguous, *others), other_kwargs).shape  # type: ignore[arg-type]
    return builder.reshape(args[0], list(new_shape))


def _cast(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    wanted = output_dtype(node)
    source: fx.Node = args[0]
    if value(source).dtype == wanted:
        return source
    return builder.call(aten._to_copy.default, source, dtype=wanted)


def _slice(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, dim, start, end, step = args + [0, None, None, 1][len(args) - 1 :]
    size = shape(x)[dim]
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    if (start, end, step) == (0, size, 1):
        source: fx.Node = x
        return source
    return builder.call(aten.slice.Tensor, x, dim, start, end, step)


def _expand(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, sizes = args[0], list(args[1])
    skip = len(sizes) - len(shape(x))
    sizes = [shape(x)[i - skip] if s == -1 else s for i, s in enumerate(sizes)]
    return x if list(shape(x)) == sizes else builder.call(aten.expand.default, x, sizes)


def _broadcast(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    size = list(torch.broadcast_shapes(*(shape(x) for x in args[0])))  # type: ignore[no-untyped-call]
    return [_expand(builder, node, [x, size], {}) for x in args[0]]


def _split(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, size = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    whole = shape(x)[dim]
    return builder.call(aten.split_with_sizes.default, x, [min(size, whole - at) for at in range(0, whole, size)], dim)


def _repeat(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit repeat: each dim becomes (times, dim) by expand, and is regrouped."""
    x, times = args[0], list(args[1])
    sizes = [1] * (len(times) - len(shape(x))) + list(shape(x))
    with_ones = [size for pair in zip([1] * len(sizes), sizes, strict=True) for size in pair]
    wide = [size for pair in zip(times, sizes, strict=True) for size in pair]
    if times == [1] * len(times):
        return builder.reshape(x, sizes)
    repeated = builder.call(aten.expand.default, builder.reshape(x, with_ones), wide)
    return builder.reshape(repeated, [count * size for count, size in zip(times, sizes, strict=True)])


def _repeat_interleave(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit repeat_interleave without ``output_size``, which is redundant; without a dim, of the flat tensor."""
    x, times, dim = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is None:
        x, dim = builder.reshape(x, [math.prod(shape(x))]), 0
    return builder.call(node.target, x, times, dim)  # type: ignore[arg-type]


def _slice_scatter(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Return the second input if the slice is the whole dim, else emit the operator, as :func:`_scatter_view` does."""
    x, part = args[:2]
    same = shape(x) == shape(part) and value(x).dtype == value(part).dtype
    result: fx.Node = part if same else _scatter_view(builder, node, args, kwargs)
    return result


def _scatter_view(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit the operator; of complex numbers, of which it has no derivative, for their real and imaginary parts."""
    x, part, dim, *place = (*args, kwargs.get("dim", 0)) if len(args) == 2 else args
    if not value(x).dtype.is_complex:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    parts = (builder.call(aten.view_as_real.default, operand) for operand in (x, part))
    options = {name: option for name, option in kwargs.items() if name != "dim"}
    changed = builder.call(node.target, *parts, dim % len(shape(x)), *place, **options)  # type: ignore[arg-type]
    return builder.call(aten.view_as_complex.default, changed)


def _constant(builder: GraphBuilder, node: fx.Node, number: Any, operand: fx.Node) -> fx.Node:
    """Emit a number as a tensor in the dtype of the result of ``node``: 0.5 - [1, 2] has no integer result."""
    return builder.call(aten.full.default, [], number, dtype=output_dtype(node), device=value(operand).device)


def _is_term(node: fx.Node, x: fx.Node) -> bool:
    """Return whether ``x`` is a scalar such as a loss, of which ranks and microbatches may hold terms.

    A number that is added to it must then be a tensor, of which each of them adds a share.
    """
    return shape(x) == () and is_float(value(x)) and output_dtype(node) == value(x).dtype


def _scalar(to_scalar: Any) -> Rewrite:
    """Return a rewrite of op.Tensor with a Python number to another operator: adding a number is not linear."""

    def rewrite(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        numbers = [a for a in args[:2] if not isinstance(a, fx.Node)]
        if not numbers:
            return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        alpha = kwargs.get("alpha", 1)
        if not isinstance(args[0], fx.Node):
            if alpha != 1 or to_scalar in (aten.sub.Scalar, aten.div.Scalar):
                return builder.call(node.target, _constant(builder, node, args[0], args[1]), *args[1:], **kwargs)  # type: ignore[arg-type]
            args = [args[1], args[0], *args[2:]]
        x, number = args[0], args[1]
        if to_scalar in (aten.mul.Scalar, aten.div.Scalar) and number == 1 and output_dtype(node) == value(x).dtype:
            source: fx.Node = x
            return source
        number = number * alpha
        if to_scalar in (aten.add.Scalar, aten.sub.Scalar) and _is_term(node, x):
            number = -number if to_scalar is aten.sub.Scalar else number
            return builder.call(aten.add.Tensor, x, _constant(builder, node, number, x))
        return builder.call(to_scalar, x, number)

    return rewrite


def _subtracted(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit number - x."""
    x, number = args[:2]
    if len(args) > 2 or kwargs or not _is_term(node, x):
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    return builder.call(aten.add.Tensor, builder.call(aten.neg.default, x), _constant(builder, node, number, x))


def _dropout(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    probability, training = args[1], args[2] if len(args) > 2 else True
    dropped = (
        builder.call(dropout, args[0], probability, op=random_calls(builder)) if probability and training else args[0]
    )
    if node.target is not aten.native_dropout.default:
        return dropped
    ones = builder.call(
        aten.full.default, list(shape(dropped)), 1.0, dtype=value(dropped).dtype, device=value(dropped).device
    )
    if dropped is not args[0]:  # its mask is where ones remain
        ones = builder.call(dropout, ones, probability, op=dropped.kwargs["op"])
    return [dropped, builder.call(aten.ne.Scalar, ones, 0)]


def _renormalized(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit the table of an embedding with max_norm, in which rows that are looked up are shortened."""
    weight, ids, limit, p = args
    rows, device = shape(weight)[0], value(weight).device
    ids = builder.reshape(ids, [math.prod(shape(ids))])
    none = builder.call(aten.full.default, [rows], 0, dtype=torch.int64, device=device)
    read = builder.call(aten.ne.Scalar, builder.call(aten.index_fill.int_Scalar, none, 0, ids, 1), 0)
    short = builder.call(aten.renorm.default, weight, p, 0, limit)
    return builder.call(aten.where.self, builder.reshape(read, [rows, 1]), short, weight)


def _index(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Look up each row by itself if an index counts rows, else emit the operator."""
    counted = CountedRows.from_indices(builder, args[0], args[1])
    return counted.read() if counted is not None else builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


def _index_put(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a write of one value to the elements of a boolean mask as torch.where."""
    x, indices, put = args[:3]
    adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    masks = [i for i in indices if i is not None and value(i).dtype in (torch.bool, torch.uint8)]
    if not masks:
        counted = CountedRows.from_indices(builder, x, indices)
        written = None if counted is None else counted.written(put, adds=adds)
        return written or builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    if len(indices) > 1 or value(put).numel() != 1:
        raise CompileError(
            "QN101",
            "index_put with a mask of bools: how many values it takes depends on the values of the mask",
            where=builder.where,
            fix="torch.where(mask, values, x), with values for all elements",
        )
    mask, missing = masks[0], len(shape(x)) - len(shape(masks[0]))
    mask = builder.reshape(mask, [*shape(mask), *[1] * missing])
    if value(mask).dtype is torch.uint8:
        mask = builder.call(aten.ne.Scalar, mask, 0)
    put = builder.reshape(put, [])
    written = builder.call(aten.add.Tensor, x, put) if adds else put
    return builder.call(aten.where.self, mask, written, x)


def _bincount(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit counts of as many numbers as the captured size allows.

    A larger number, for which torch's result would be longer, fails in the model, too.
    """
    ids, weights = args[0], args[1] if len(args) > 1 else kwargs.get("weights")
    count, device = int(node.meta["val"].shape[0]), value(ids).device
    if weights is None:
        weights = builder.call(aten.full.default, list(shape(ids)), 1, dtype=torch.int64, device=device)
    zeros = builder.call(aten.full.default, [count], 0, dtype=value(weights).dtype, device=device)
    return builder.call(aten.index_add.default, zeros, 0, ids, weights)


def _filled(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a tensor like another one, of which only shape, dtype and device matter."""
    name = operator_name(node.target)
    fill = 1 if "ones" in name else kwargs.get("fill_value", args[-1]) if "full" in name else 0
    size = args[1] if name.startswith("new_") else shape(args[0])
    device = value(args[0]).device
    return builder.call(aten.full.default, list(size), fill, dtype=output_dtype(node), device=device)


def _copy(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit copy(destination, source): the source in the destination's shape and dtype."""
    source = _expand(builder, node, [args[1], list(shape(args[0]))], {})
    wanted = value(args[0]).dtype
    return source if value(source).dtype == wanted else builder.call(aten._to_copy.default, source, dtype=wanted)


def _renamed(target: Any) -> Rewrite:
    """Return a rewrite to an operator that does the same."""

    def rewrite(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        return builder.call(target, *args, **kwargs)

    return rewrite


def _pad(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    fill = args[3] if len(args) > 3 else kwargs.get("value")
    if mode != "constant":
        return builder.call(aten.pad.default, *args, **kwargs)
    return builder.call(aten.constant_pad_nd.default, args[0], args[1], fill or 0)


REWRITES: dict[Any, Rewrite] = {
    **RANDOM_REWRITES,
    **DERIVATIVE_REWRITES,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(
        [aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats], emit_batch_norm
    ),
    **dict.fromkeys(
        [
            aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default,
            aten.lift.default, aten.alias_copy.default, aten.resolve_conj.default, aten.resolve_neg.default,
        ],
        _identity,
    ),
    **dict.fromkeys(
        [
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default,
            aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.flatten.using_ints,
            aten.unflatten.int, aten.view_as.default, aten.view_copy.default, aten.squeeze_copy.default,
            aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.unsqueeze_copy.default,
        ],
        _reshape,
    ),
    **dict.fromkeys(
        [
            aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other,
            aten.type_as.default,
        ],
        _cast,
    ),
    **dict.fromkeys([aten.mean.default, aten.mean.dim], mean),
    **dict.fromkeys([aten.dropout.default, aten.native_dropout.default], _dropout),
    **dict.fromkeys(
        [
            aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
            aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        ],
        _filled,
    ),
    aten.cat.default: cat,
    aten.instance_norm.default: emit_instance_norm,
    aten._conj.default: _renamed(aten._conj_physical.default),
    aten._neg_view.default: _renamed(aten.neg.default),
    aten.zero.default: _filled,
    aten.max.other: _renamed(aten.maximum.default),
    aten.min.other: _renamed(aten.minimum.default),
    aten.__and__.Tensor: _renamed(aten.bitwise_and.Tensor),
    aten.__or__.Tensor: _renamed(aten.bitwise_or.Tensor),
    aten.__xor__.Tensor: _renamed(aten.bitwise_xor.Tensor),
    aten.__and__.Scalar: _renamed(aten.bitwise_and.Scalar),
    aten.__or__.Scalar: _renamed(aten.bitwise_or.Scalar),
    aten.__xor__.Scalar: _renamed(aten.bitwise_xor.Scalar),
    aten.__lshift__.Tensor: _renamed(aten.bitwise_left_shift.Tensor),
    aten.__rshift__.Tensor: _renamed(aten.bitwise_right_shift.Tensor),
    aten.__lshift__.Scalar: _renamed(aten.bitwise_left_shift.Tensor_Scalar),
    aten.__rshift__.Scalar: _renamed(aten.bitwise_right_shift.Tensor_Scalar),
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.broadcast_tensors.default: _broadcast,
    aten.split.Tensor: _split,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _scatter_view,
    aten.add.Tensor: _scalar(aten.add.Scalar),
    aten.add.Scalar: _scalar(aten.add.Scalar),
    aten.sub.Scalar: _scalar(aten.sub.Scalar),
    aten.rsub.Scalar: _subtracted,
    aten.sub.Tensor: _scalar(aten.sub.Scalar),
    aten.mul.Tensor: _scalar(aten.mul.Scalar),
    aten.div.Tensor: _scalar(aten.div.Scalar),
    aten.copy.default: _copy,
    aten.embedding_renorm.default: _renormalized,
    aten.embedding_bag.padding_idx: embedding_bag,
    **dict.fromkeys([aten.as_strided.default, aten.as_strided_copy.default], as_strided),
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.bincount.default: _bincount,
    aten.pad.default: _pad,
    aten.cross_entropy_loss.default: cross_entropy,
    **dict.fromkeys([aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default], nll),
    aten.l1_loss.default: distance,
    aten.kl_div.default: divergence,
    aten.multilabel_margin_loss_forward.default: many_labels,
    aten.scaled_dot_product_attention.default: scaled_dot_product,
    attention: masked_attention,
}  # fmt: skip
