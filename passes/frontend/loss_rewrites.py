"""Canonical forms of means and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.precision import widened
from ...ir.builder import GraphBuilder
from ...ops.cross_entropy import row_nll
from ...strategies.emit_conversion import cast

aten = torch.ops.aten


def mean(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a mean as a sum and a division by the global count, so that each rank's sum is a term."""
    x = args[0]
    dims = (args[1] if len(args) > 1 else kwargs.get("dim")) or list(range(len(shape(x))))
    dims = [d % len(shape(x)) for d in ([dims] if isinstance(dims, int) else dims) if shape(x)]
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    count = math.prod(shape(x)[d] for d in dims)
    dtype = output_dtype(node)
    # as torch does: 16-bit values are summed in 32 bits
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if value(x).dtype != wide:
        x = builder.call(aten._to_copy.default, x, dtype=wide)
    if not dims:
        total = x
    elif len(dims) == len(shape(x)) and not keep:
        total = builder.call(aten.sum.default, x)
    else:
        total = builder.call(aten.sum.dim_IntList, x, dims, keep)
    mean = builder.call(aten.div.Scalar, total, count)
    return mean if wide == dtype else builder.call(aten._to_copy.default, mean, dtype=dtype)


@dataclass(frozen=True)
class _LossOptions:
    """Options of a loss of labels. ``rows``: the shape of the result if there is no reduction."""

    weight: fx.Node | None
    reduction: int
    ignore: int
    smoothing: float
    rows: list[int]


NONE, MEAN, SUM = range(3)  # reductions, as torch numbers them


def cross_entropy(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a loss per row, then an explicit sum and count, as torch.nn.functional.cross_entropy defines them.

    The count depends on labels alone, so that a mean over tokens can be split over ranks and microbatches exactly.
    """
    defaults = (None, None, None, 1, -100, 0.0)
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    filled = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
    logits, target, weight, reduction, ignore, smoothing = filled
    dims = shape(logits)
    classes = dims[0] if len(dims) == 1 else dims[1]
    if len(dims) == 1:
        logits = builder.reshape(logits, [1, classes])
    elif len(dims) > 2:
        logits = _classes_last(builder, logits)
    rows = shape(logits)[:-1]
    logits = builder.reshape(logits, [math.prod(rows), classes])
    options = _LossOptions(weight, reduction, ignore, smoothing, list(rows) if len(dims) > 1 else [])
    probabilities = value(target).is_floating_point()
    if weight is None and not smoothing and not probabilities:
        return _fused(builder, logits, target, options)
    logp = builder.call(aten._log_softmax.default, logits, 1, False)
    if not probabilities:
        return _labelled(builder, logp, target, options)
    if len(dims) > 2:
        target = builder.call(aten.permute.default, target, [0, *range(2, len(dims)), 1])
    return _against_probabilities(builder, logp, target, options)


def _fused(builder: GraphBuilder, logits: fx.Node, labels: fx.Node, options: _LossOptions) -> fx.Node:
    """Return the loss of logits [rows, classes] and labels, without weights or smoothing."""
    labels = builder.reshape(labels, [shape(logits)[0]])
    losses = builder.call(row_nll, logits, labels, options.ignore)
    if options.reduction == NONE:
        return builder.reshape(losses, options.rows)
    if options.reduction == SUM:
        return _sum_or_mean(builder, losses, None)
    valid = builder.call(aten.ne.Scalar, labels, options.ignore)
    wide = widened(value(logits).dtype)
    return _sum_or_mean(builder, losses, builder.call(aten._to_copy.default, valid, dtype=wide))


def _against_probabilities(builder: GraphBuilder, logp: fx.Node, target: fx.Node, options: _LossOptions) -> fx.Node:
    """Return the loss of log-probabilities [rows, classes] and probabilities of classes."""
    call, (count, classes) = builder.call, shape(logp)
    target = builder.reshape(target, [count, classes])
    if options.smoothing:
        smoothing = options.smoothing
        target = call(aten.add.Scalar, call(aten.mul.Scalar, target, 1 - smoothing), smoothing / classes)
    terms = call(aten.mul.Tensor, logp, target)
    if options.weight is not None:
        terms = call(aten.mul.Tensor, terms, options.weight)
    losses = call(aten.neg.default, call(aten.sum.dim_IntList, terms, [1]))
    if options.reduction == NONE:
        return builder.reshape(losses, options.rows)
    total = call(aten.sum.default, cast(builder, losses, widened(value(losses).dtype)))
    if options.reduction != SUM:
        total = call(aten.div.Scalar, total, count)
    return cast(builder, total, value(losses).dtype)


def nll(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit nll_loss of [C], [N, C] or [N, C, ...] as rows, like :func:`cross_entropy`."""
    defaults = (None, None, None, 1, -100)
    names = ("self", "target", "weight", "reduction", "ignore_index")
    filled = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
    logp, target, weight, reduction, ignore = filled
    dims = shape(logp)
    if len(dims) > 2:
        logp = _classes_last(builder, logp)
    rows, classes = shape(logp)[:-1], shape(logp)[-1]
    logp = builder.reshape(logp, [math.prod(rows), classes])
    return _labelled(builder, logp, target, _LossOptions(weight, reduction, ignore, 0.0, list(rows)))


def _classes_last(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """Return [N, C, ...] as [N, ..., C]. If a transpose has made the former, return its input."""
    rank = len(shape(x))
    if rank == 3 and x.target is aten.transpose.int and {d % rank for d in x.args[1:]} == {1, 2}:  # type: ignore[operator]
        return x.all_input_nodes[0]
    order = [0, *range(2, rank), 1]
    if x.target is aten.permute.default and [x.args[1][d] % rank for d in order] == list(range(rank)):  # type: ignore[index, operator]
        return x.all_input_nodes[0]
    return builder.call(aten.permute.default, x, order)


def _labelled(builder: GraphBuilder, logp: fx.Node, target: fx.Node, options: _LossOptions) -> fx.Node:
    """Return the loss of log-probabilities [rows, classes] and labels."""
    call, (count, classes), weight = builder.call, shape(logp), options.weight
    target = builder.reshape(target, [count])
    losses = builder.getitem(call(aten.nll_loss_forward.default, logp, target, weight, 0, options.ignore), 0)
    valid = call(aten.ne.Scalar, target, options.ignore)
    dtype = value(logp).dtype
    wide = widened(dtype)
    row_weights = call(aten._to_copy.default, valid, dtype=wide)
    if weight is not None:
        safe = call(aten.mul.Tensor, target, call(aten._to_copy.default, valid, dtype=value(target).dtype))
        picked = call(aten.embedding.default, builder.reshape(weight, [classes, 1]), safe)
        row_weights = call(aten.mul.Tensor, row_weights, cast(builder, builder.reshape(picked, [count]), wide))
    if options.smoothing:
        spread = call(aten.mul.Tensor, logp, weight) if weight is not None else logp
        smooth = call(aten.neg.default, call(aten.sum.dim_IntList, spread, [1]))
        smooth = call(aten.mul.Tensor, smooth, call(aten._to_copy.default, valid, dtype=dtype))
        smooth = call(aten.mul.Scalar, smooth, options.smoothing / classes)
        losses = call(aten.add.Tensor, call(aten.mul.Scalar, losses, 1 - options.smoothing), smooth)
    if options.reduction == NONE:
        return builder.reshape(losses, options.rows)
    return _sum_or_mean(builder, losses, row_weights if options.reduction == MEAN else None)


def _sum_or_mean(builder: GraphBuilder, losses: fx.Node, row_weights: fx.Node | None) -> fx.Node:
    """Return the sum of losses, or their mean with ``row_weights``.

    As in torch, sums have 32 bits at least: a 16-bit number cannot count 65,505 labels.
    """
    call, dtype = builder.call, value(losses).dtype
    total = call(aten.sum.default, cast(builder, losses, widened(dtype)))
    if row_weights is not None:
        total = call(aten.div.Tensor, total, call(aten.sum.default, row_weights))
    return cast(builder, total, dtype)


def distance(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit l1_loss."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    distance = builder.call(aten.abs.default, builder.call(aten.sub.Tensor, args[0], args[1]))
    if reduction == NONE:
        return distance
    return mean(builder, node, [distance], {}) if reduction == MEAN else builder.call(aten.sum.default, distance)


def divergence(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit kl_div: target * (log(target) - input), where 0 * log(0) is 0."""
    call, source, target = builder.call, args[0], args[1]
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if kwargs.get("log_target"):
        weight = call(aten.exp.default, target)
        entropy = call(aten.mul.Tensor, weight, target)
    else:
        weight, entropy = target, call(aten.xlogy.Tensor, target, target)
    terms = call(aten.sub.Tensor, entropy, call(aten.mul.Tensor, weight, source))
    if reduction == NONE:
        return terms
    return mean(builder, node, [terms], {}) if reduction == MEAN else call(aten.sum.default, terms)


def many_labels(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Emit multilabel_margin_loss as the loss of each row, and their sum or mean; and which classes are labels."""
    reduction = args[2]
    results = builder.call(node.target, *args[:2], 0)  # type: ignore[arg-type]
    losses, labelled = builder.getitem(results, 0), builder.getitem(results, 1)
    if reduction == NONE:
        return [losses, labelled]
    total = builder.call(aten.sum.default, cast(builder, losses, widened(value(losses).dtype)))
    if reduction == MEAN:
        total = builder.call(aten.div.Scalar, total, math.prod(shape(losses)))
    return [cast(builder, total, value(losses).dtype), labelled]


def output_dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
