"""How :mod:`.normalize` spells means and losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.precision import widened
from ...ir.builder import GraphBuilder
from ...ops.cross_entropy import row_nll
from ..lowering.reductions import cast

aten = torch.ops.aten


def mean(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A mean is a sum and a division by the global count: each rank's sum is a term."""
    x = args[0]
    dims = (args[1] if len(args) > 1 else kwargs.get("dim")) or list(range(len(shape(x))))
    dims = [d % len(shape(x)) for d in ([dims] if isinstance(dims, int) else dims) if shape(x)]
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    count = math.prod(shape(x)[d] for d in dims)
    wanted = output_dtype(node)
    # as torch does: 16-bit values are added up in 32 bits
    wide = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
    if value(x).dtype != wide:
        x = builder.call(aten._to_copy.default, x, dtype=wide)
    if not dims:
        total = x
    elif len(dims) == len(shape(x)) and not keep:
        total = builder.call(aten.sum.default, x)
    else:
        total = builder.call(aten.sum.dim_IntList, x, dims, keep)
    mean = builder.call(aten.div.Scalar, total, count)
    return mean if wide == wanted else builder.call(aten._to_copy.default, mean, dtype=wanted)


def cross_entropy(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Per-row losses, then an explicit sum and count: the count depends on labels alone, which is what lets a mean
    over tokens be split over ranks and microbatches exactly (torch.nn.functional.cross_entropy's definition)."""
    defaults = (None, None, None, 1, -100, 0.0)
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    filled = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
    logits, target, weight, reduction, ignore, smoothing = filled
    call = builder.call
    dims = shape(logits)
    classes = dims[0] if len(dims) == 1 else dims[1]
    if len(dims) == 1:
        logits = builder.reshape(logits, [1, classes])
    elif len(dims) > 2:
        logits = _classes_last(builder, logits)
    rows = shape(logits)[:-1]
    count = 1
    for size in rows:
        count *= size
    logits = builder.reshape(logits, [count, classes])
    if weight is None and not smoothing and not value(target).is_floating_point():
        target = builder.reshape(target, [count])
        losses = call(row_nll, logits, target, ignore)
        if reduction == 0:
            return builder.reshape(losses, list(rows) if len(dims) > 1 else [])
        wide = widened(value(logits).dtype)
        valid = (
            None if reduction == 2 else call(aten._to_copy.default, call(aten.ne.Scalar, target, ignore), dtype=wide)
        )
        return _sum_or_mean(builder, losses, valid)
    logp = call(aten._log_softmax.default, logits, 1, False)
    if value(target).is_floating_point():
        if len(dims) > 2:
            target = call(aten.permute.default, target, [0, *range(2, len(dims)), 1])
        target = builder.reshape(target, [count, classes])
        if smoothing:
            target = call(aten.add.Scalar, call(aten.mul.Scalar, target, 1 - smoothing), smoothing / classes)
        terms = call(aten.mul.Tensor, logp, target)
        if weight is not None:
            terms = call(aten.mul.Tensor, terms, weight)
        losses = call(aten.neg.default, call(aten.sum.dim_IntList, terms, [1]))
        if reduction == 0:
            return builder.reshape(losses, list(rows) if len(dims) > 1 else [])
        total = call(aten.sum.default, cast(builder, losses, widened(value(losses).dtype)))
        return cast(builder, total if reduction == 2 else call(aten.div.Scalar, total, count), value(losses).dtype)
    return _labelled(builder, logp, target, weight, reduction, ignore, smoothing, list(rows) if len(dims) > 1 else [])


def nll(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """nll_loss of [C], [N, C] or [N, C, ...] as rows, like :func:`cross_entropy`."""
    defaults = (None, None, None, 1, -100)
    names = ("self", "target", "weight", "reduction", "ignore_index")
    filled = [*args, *(kwargs.get(n, d) for n, d in list(zip(names, defaults, strict=True))[len(args) :])]
    logp, target, weight, reduction, ignore = filled
    dims = shape(logp)
    if len(dims) > 2:
        logp = _classes_last(builder, logp)
    rows, classes = shape(logp)[:-1], shape(logp)[-1]
    logp = builder.reshape(logp, [math.prod(rows), classes])
    return _labelled(builder, logp, target, weight, reduction, ignore, 0.0, list(rows))


def _classes_last(builder: GraphBuilder, x: fx.Node) -> fx.Node:
    """[N, C, ...] as [N, ..., C]: what was exchanged to make the former, where that is all."""
    rank = len(shape(x))
    if rank == 3 and x.target is aten.transpose.int and {d % rank for d in x.args[1:]} == {1, 2}:  # type: ignore[operator]
        return x.all_input_nodes[0]
    order = [0, *range(2, rank), 1]
    if x.target is aten.permute.default and [x.args[1][d] % rank for d in order] == list(range(rank)):  # type: ignore[index, operator]
        return x.all_input_nodes[0]
    return builder.call(aten.permute.default, x, order)


def _labelled(
    builder: GraphBuilder,
    logp: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore: int,
    smoothing: float,
    rows: list[int],
) -> fx.Node:
    """The loss of log-probabilities [rows, classes] and labels, in the shape ``rows`` where nothing is added up."""
    call, (count, classes) = builder.call, shape(logp)
    target = builder.reshape(target, [count])
    losses = builder.getitem(call(aten.nll_loss_forward.default, logp, target, weight, 0, ignore), 0)
    valid = call(aten.ne.Scalar, target, ignore)
    dtype = value(logp).dtype
    wide = widened(dtype)
    counted = call(aten._to_copy.default, valid, dtype=wide)
    if weight is not None:
        safe = call(aten.mul.Tensor, target, call(aten._to_copy.default, valid, dtype=value(target).dtype))
        picked = call(aten.embedding.default, builder.reshape(weight, [classes, 1]), safe)
        counted = call(aten.mul.Tensor, counted, cast(builder, builder.reshape(picked, [count]), wide))
    if smoothing:
        spread = call(aten.mul.Tensor, logp, weight) if weight is not None else logp
        smooth = call(aten.neg.default, call(aten.sum.dim_IntList, spread, [1]))
        smooth = call(aten.mul.Tensor, smooth, call(aten._to_copy.default, valid, dtype=dtype))
        smooth = call(aten.mul.Scalar, smooth, smoothing / classes)
        losses = call(aten.add.Tensor, call(aten.mul.Scalar, losses, 1 - smoothing), smooth)
    if reduction == 0:
        return builder.reshape(losses, rows)
    return _sum_or_mean(builder, losses, counted if reduction == 1 else None)


def _sum_or_mean(builder: GraphBuilder, losses: fx.Node, counted: fx.Node | None) -> fx.Node:
    """``counted``: what each row counts in a mean. Added up, as torch does, in 32 bits at least: a 16-bit number
    cannot count 65,505 labels."""
    call, dtype = builder.call, value(losses).dtype
    total = call(aten.sum.default, cast(builder, losses, widened(dtype)))
    found = total if counted is None else call(aten.div.Tensor, total, call(aten.sum.default, counted))
    return cast(builder, found, dtype)


def distance(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """l1_loss: reduction 0 is none, 1 the mean, 2 the sum."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    distance = builder.call(aten.abs.default, builder.call(aten.sub.Tensor, args[0], args[1]))
    if reduction == 0:
        return distance
    return mean(builder, node, [distance], {}) if reduction == 1 else builder.call(aten.sum.default, distance)


def divergence(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """kl_div: target * (log(target) - input), where 0 * log(0) is 0."""
    call, source, target = builder.call, args[0], args[1]
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if kwargs.get("log_target"):
        weight = call(aten.exp.default, target)
        entropy = call(aten.mul.Tensor, weight, target)
    else:
        weight, entropy = target, call(aten.xlogy.Tensor, target, target)
    terms = call(aten.sub.Tensor, entropy, call(aten.mul.Tensor, weight, source))
    if reduction == 0:
        return terms
    return mean(builder, node, [terms], {}) if reduction == 1 else call(aten.sum.default, terms)


def many_labels(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """multilabel_margin_loss: the loss of each row, and their sum or mean; and which classes are labels."""
    reduction = args[2]
    made = builder.call(node.target, *args[:2], 0)  # type: ignore[arg-type]
    losses, labelled = builder.getitem(made, 0), builder.getitem(made, 1)
    if reduction == 0:
        return [losses, labelled]
    total = builder.call(aten.sum.default, cast(builder, losses, widened(value(losses).dtype)))
    if reduction == 1:
        total = builder.call(aten.div.Scalar, total, math.prod(shape(losses)))
    return [cast(builder, total, value(losses).dtype), labelled]


def output_dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
