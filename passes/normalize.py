"""Captured -> Program: fix the batch size, and rewrite to few canonical operators."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..annotations import Leaf, shape, value
from ..attention_ops import attention
from ..builder import GraphBuilder
from ..canonical import LEAF, WHERE
from ..comm_ops import dropout, row_nll
from ..errors import CompileError, Where
from ..program import Captured, Program

aten = torch.ops.aten
ONE_DOCUMENT = "one_document"  # in a node's meta: whether these ids of documents are the same everywhere
Rewrite = Callable[[GraphBuilder, fx.Node, list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Normalize:
    """Give every value a concrete global shape and every computation one spelling.

    Before: ``view(x, [sym_size, -1])``, ``clone``, ``add(x, 1)``, ``cross_entropy_loss``
    After:  ``reshape(x, [8, 64])``, nothing, ``add.Scalar(x, 1)``, ``log_softmax``, ``nll_loss``, ``sum``, ``div``
    Ensures: no symbolic sizes; no views other than reshape, expand, permute, slice, select, split; no copies.

    ``batch_size`` is the global batch: all data ranks and all microbatches. ``device``: where programs will run.

    Raises:
        CompileError: QN105 for random operators other than dropout.
    """

    batch_size: int
    device: torch.device

    def __call__(self, captured: Captured, /) -> Program:
        if captured.only_rows not in (None, self.batch_size):
            raise CompileError(
                "QN106",
                f"a batch of {self.batch_size} rows, and the model's code fixes the batch size that it was traced "
                f"with: {captured.only_rows}",
                fix="use x.shape[0] (or -1) where a literal batch size is used, or batches of that size",
            )
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        builder = GraphBuilder(mode)
        env: dict[fx.Node, Any] = {}
        for node in captured.graph.nodes:
            builder.where = node.meta.get(WHERE, Where())
            if node.op == "placeholder":
                env[node] = self._leaf(builder, node)
            elif node.op == "output":
                builder.output(tuple(env[n] for n in node.args[0]))
            else:
                args = [_resolve(a, env) for a in node.args]
                kwargs = {k: _resolve(a, env) for k, a in node.kwargs.items()}
                env[node] = self._node(builder, node, args, kwargs)
        _drop_unused(builder.graph)
        return Program(captured, builder.graph, mode, self.batch_size)

    def _leaf(self, builder: GraphBuilder, node: fx.Node) -> fx.Node:
        leaf: Leaf = node.meta[LEAF]
        traced = node.meta["val"]
        if not isinstance(traced, Tensor):
            raise CompileError(
                "QN102",
                f"the batch has a {type(traced).__name__} at {leaf.name}",
                fix="pass tensors, and flags that the model's code branches on",
            )
        sizes = [self.batch_size if isinstance(s, SymInt) else int(s) for s in traced.shape]
        with builder.mode:
            fake = torch.empty(sizes, dtype=traced.dtype, device=self.device)
        return builder.placeholder(node.name, fake, leaf, needs_grad=leaf.trainable)

    def _node(self, builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if target in (aten.sym_size.int, torch.sym_float, torch.sym_int):
            return shape(args[0])[args[1]] if target is aten.sym_size.int else args[0]
        if not any(isinstance(a, fx.Node) for a in _flat((args, kwargs))) and not isinstance(
            target, torch._ops.OpOverload
        ):
            return target(*args, **kwargs)  # arithmetic on sizes
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        if "device" in kwargs:
            kwargs["device"] = self.device
        kwargs.pop("pin_memory", None)
        kwargs.pop("memory_format", None)
        rewrite = REWRITES.get(target)
        try:
            if rewrite is not None:
                return rewrite(builder, node, args, kwargs)
            return builder.call(target, *args, **kwargs)
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(
                "QN106",
                f"with a batch of {self.batch_size}, {target} fails: {str(error).splitlines()[0][:200]}",
                where=builder.where,
                fix="the model's code fits some batch sizes only; use one of those",
            ) from error


def _flat(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def _resolve(arg: Any, env: dict[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return env[arg]
    if isinstance(arg, (list, tuple)):
        return [_resolve(a, env) for a in arg]
    return arg


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op not in ("output", "placeholder") and not node.users:
            graph.erase_node(node)


def _identity(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    source: fx.Node = args[0]
    return source


def _reshape(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Any view that only regroups dims becomes reshape (strides differ on each rank anyway)."""
    with builder.mode:
        after = node.target(value(args[0]).contiguous(), *args[1:], **kwargs).shape  # type: ignore[operator]
    return builder.reshape(args[0], [int(s) for s in after])


def _cast(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    wanted = _output_dtype(node)
    source: fx.Node = args[0]
    if value(source).dtype == wanted:
        return source
    return builder.call(aten._to_copy.default, source, dtype=wanted)


def _output_dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _slice(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, dim, start, end, step = args + [0, None, None, 1][len(args) - 1 :]
    size = shape(x)[dim]
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    if (start, end, step) == (0, size, 1):
        found: fx.Node = x
        return found
    return builder.call(aten.slice.Tensor, x, dim, start, end, step)


def _expand(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, sizes = args[0], list(args[1])
    skip = len(sizes) - len(shape(x))
    sizes = [shape(x)[i - skip] if s == -1 else s for i, s in enumerate(sizes)]
    return x if list(shape(x)) == sizes else builder.call(aten.expand.default, x, sizes)


def _broadcast(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    after = list(torch.broadcast_shapes(*(shape(x) for x in args[0])))  # type: ignore[no-untyped-call]
    return [_expand(builder, node, [x, after], {}) for x in args[0]]


def _split(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    x, size = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    whole = shape(x)[dim]
    return builder.call(aten.split_with_sizes.default, x, [min(size, whole - at) for at in range(0, whole, size)], dim)


def _scalar(to_scalar: Any) -> Rewrite:
    """op.Tensor with a Python number is another operator: adding a number is not linear, adding a tensor is."""

    def rewrite(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        numbers = [a for a in args[:2] if not isinstance(a, fx.Node)]
        if not numbers:
            return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if not isinstance(args[0], fx.Node):
            args = [args[1], args[0], *args[2:]]
        x, number = args[0], args[1]
        if to_scalar in (aten.mul.Scalar, aten.div.Scalar) and number == 1 and _output_dtype(node) == value(x).dtype:
            found: fx.Node = x
            return found
        number = number * kwargs.get("alpha", 1)
        return builder.call(to_scalar, x, number)

    return rewrite


def _dropout(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    probability, training = args[1], args[2] if len(args) > 2 else True
    kept = builder.call(dropout, args[0], probability, op=_count(builder)) if probability and training else args[0]
    # native_dropout also returns its mask, which the derivative does not need here
    return [kept, kept] if node.target is aten.native_dropout.default else kept


def _count(builder: GraphBuilder) -> int:
    """How many random operators there are so far: their order is that of the model's own calls."""
    return sum(node.target is dropout for node in builder.graph.nodes)


def _attention(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Without a mask of the user's own, quintnet.attention. With dropout, attention is written out: its mask is over
    (query, key), which no fused kernel takes from us."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not given.get("dropout_p"):
        return _plain_attention(builder, given) or builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    call, query, key, val = builder.call, given["query"], given["key"], given["value"]
    if given.get("enable_gqa"):
        groups = shape(query)[-3] // shape(key)[-3]
        key, val = (call(aten.repeat_interleave.self_int, x, groups, len(shape(x)) - 3) for x in (key, val))
    scale = given.get("scale")
    scale = shape(query)[-1] ** -0.5 if scale is None else scale
    dims = list(range(len(shape(key))))
    scores = call(aten.matmul.default, query, call(aten.permute.default, key, [*dims[:-2], dims[-1], dims[-2]]))
    scores = call(aten.mul.Scalar, scores, scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        ones = call(aten.ones.default, list(shape(scores)[-2:]), dtype=torch.bool, device=value(scores).device)
        mask = call(aten.tril.default, ones)
    if mask is not None and value(mask).dtype == torch.bool:
        scores = call(aten.masked_fill.Scalar, scores, call(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten._softmax.default, scores, len(dims) - 1, False)
    weights = call(dropout, weights, given["dropout_p"], op=_count(builder))
    return call(aten.matmul.default, weights, val)


def _plain_attention(builder: GraphBuilder, given: dict[str, Any]) -> fx.Node | None:
    """Mask-free attention of [batch, heads, positions, features] in which nothing broadcasts; None for any other."""
    names = ("query", "key", "value")
    tensors = [given[name] for name in names]
    q, k, v = map(shape, tensors)
    if len(q) == len(k) == len(v) == 3:  # as one head of each
        several = [builder.reshape(x, [shape(x)[0], 1, *shape(x)[1:]]) for x in tensors]
        made = _plain_attention(builder, given | dict(zip(names, several, strict=True)))
        return made and builder.reshape(made, [*q[:2], v[2]])
    if given.get("attn_mask") is not None or len(q) != 4 or k[:3] != v[:3] or q[0] != k[0]:
        return None
    if q[1] != k[1] and not given.get("enable_gqa"):
        return None
    scale = given.get("scale")
    scale = q[-1] ** -0.5 if scale is None else scale
    return builder.call(attention, *tensors, scale=scale, causal=bool(given.get("is_causal")), window=0)


def _masked_attention(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A window as long as the sequence is none; documents that the model's constants say are one are none."""
    given = dict(zip(("q", "k", "v", "padding", "segments"), args, strict=False)) | kwargs
    if given.get("segments") is not None and _one_document(given["segments"]):
        del given["segments"]
    window = given["window"] if given["window"] < shape(given["q"])[2] else 0
    tensors = [given.get(name) for name in ("q", "k", "v", "padding", "segments")]
    return builder.call(attention, *tensors, scale=given["scale"], causal=given["causal"], window=window)


def _one_document(segments: fx.Node) -> bool:
    """Whether ids are equal in every row, for any batch: Hugging Face models derive them from positions, which they
    make themselves where the user gives none."""
    if ONE_DOCUMENT not in segments.meta:  # all blocks ask for the same
        segments.meta[ONE_DOCUMENT] = _equal_in_rows(segments)
    return bool(segments.meta[ONE_DOCUMENT])


def _equal_in_rows(segments: fx.Node) -> bool:
    needed, todo = set[fx.Node](), [segments]
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            return False
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    env: dict[fx.Node, Any] = {}
    for node in segments.graph.nodes:
        if node in needed:
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            options = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            env[node] = node.target(*args, **options)
    found: Tensor = env[segments]
    return bool((found == found[:, :1]).all())


def _random(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    raise CompileError(
        "QN105",
        f"{node.target} draws random numbers, which would differ between layouts",
        where=builder.where,
        fix="use dropout, whose mask is the same on every layout, or pass the random numbers in the batch",
    )


def _mean(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A mean is a sum and a division by the global count: each rank's sum is a term."""
    x = args[0]
    dims = (args[1] if len(args) > 1 else kwargs.get("dim")) or list(range(len(shape(x))))
    dims = [d % len(shape(x)) for d in ([dims] if isinstance(dims, int) else dims)]
    keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    count = math.prod(shape(x)[d] for d in dims)
    wanted = _output_dtype(node)
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


def _filled(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A tensor made after another one depends on nothing of it but its shape and kind."""
    name = node.target._opname  # type: ignore[union-attr]
    fill = 1 if "ones" in name else kwargs.get("fill_value", args[-1]) if "full" in name else 0
    size = args[1] if name.startswith("new_") else shape(args[0])
    device = value(args[0]).device
    return builder.call(aten.full.default, list(size), fill, dtype=_output_dtype(node), device=device)


def _copy(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """copy(destination, source) is source, in destination's shape and dtype."""
    source = _expand(builder, node, [args[1], list(shape(args[0]))], {})
    wanted = value(args[0]).dtype
    return source if value(source).dtype == wanted else builder.call(aten._to_copy.default, source, dtype=wanted)


def _cross_entropy(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
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
        logits = call(aten.permute.default, logits, [0, *range(2, len(dims)), 1])
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
        total = call(aten.sum.default, losses)
        valid = call(aten._to_copy.default, call(aten.ne.Scalar, target, ignore), dtype=value(logits).dtype)
        return total if reduction == 2 else call(aten.div.Tensor, total, call(aten.sum.default, valid))
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
        total = call(aten.sum.default, losses)
        return total if reduction == 2 else call(aten.div.Scalar, total, count)
    target = builder.reshape(target, [count])
    losses = builder.getitem(call(aten.nll_loss_forward.default, logp, target, weight, 0, ignore), 0)
    valid = call(aten.ne.Scalar, target, ignore)
    dtype = value(logp).dtype
    counted = call(aten._to_copy.default, valid, dtype=dtype)
    if weight is not None:
        safe = call(aten.mul.Tensor, target, call(aten._to_copy.default, valid, dtype=value(target).dtype))
        picked = call(aten.embedding.default, builder.reshape(weight, [classes, 1]), safe)
        counted = call(aten.mul.Tensor, counted, builder.reshape(picked, [count]))
    if smoothing:
        spread = call(aten.mul.Tensor, logp, weight) if weight is not None else logp
        smooth = call(aten.neg.default, call(aten.sum.dim_IntList, spread, [1]))
        smooth = call(aten.mul.Tensor, smooth, call(aten._to_copy.default, valid, dtype=dtype))
        smooth = call(aten.mul.Scalar, smooth, smoothing / classes)
        losses = call(aten.add.Tensor, call(aten.mul.Scalar, losses, 1 - smoothing), smooth)
    if reduction == 0:
        return builder.reshape(losses, list(rows) if len(dims) > 1 else [])
    total = call(aten.sum.default, losses)
    return total if reduction == 2 else call(aten.div.Tensor, total, call(aten.sum.default, counted))


def _distance(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """l1_loss: reduction 0 is none, 1 the mean, 2 the sum."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    distance = builder.call(aten.abs.default, builder.call(aten.sub.Tensor, args[0], args[1]))
    if reduction == 0:
        return distance
    return _mean(builder, node, [distance], {}) if reduction == 1 else builder.call(aten.sum.default, distance)


def _divergence(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
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
    return _mean(builder, node, [terms], {}) if reduction == 1 else call(aten.sum.default, terms)


def _called(target: Any) -> Rewrite:
    """The same operator under its usual name."""

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
    **dict.fromkeys(
        [
            aten.alias.default, aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default,
            aten.lift.default,
        ],
        _identity,
    ),
    **dict.fromkeys(
        [
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default,
            aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.flatten.using_ints,
            aten.unflatten.int, aten.view_as.default,
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
    **dict.fromkeys([aten.mean.default, aten.mean.dim], _mean),
    **dict.fromkeys([aten.dropout.default, aten.native_dropout.default], _dropout),
    **dict.fromkeys(
        [
            aten.bernoulli.default, aten.bernoulli.p, aten.rand.default, aten.randn.default, aten.rand_like.default,
            aten.randn_like.default, aten.randint.default, aten.randint.low, aten.randint_like.default,
            aten.randperm.default, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor,
            aten.normal_functional.default, aten.uniform.default, aten.exponential.default, aten.multinomial.default,
            aten.poisson.default, aten.alpha_dropout.default, aten.feature_dropout.default,
            aten.feature_alpha_dropout.default, aten.rrelu_with_noise.default, aten.rrelu_with_noise_functional.default,
        ],
        _random,
    ),
    **dict.fromkeys(
        [
            aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
            aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        ],
        _filled,
    ),
    aten.max.other: _called(aten.maximum.default),
    aten.min.other: _called(aten.minimum.default),
    aten.__and__.Tensor: _called(aten.bitwise_and.Tensor),
    aten.__or__.Tensor: _called(aten.bitwise_or.Tensor),
    aten.__xor__.Tensor: _called(aten.bitwise_xor.Tensor),
    aten.__lshift__.Scalar: _called(aten.bitwise_left_shift.Tensor_Scalar),
    aten.__rshift__.Scalar: _called(aten.bitwise_right_shift.Tensor_Scalar),
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.broadcast_tensors.default: _broadcast,
    aten.split.Tensor: _split,
    aten.add.Tensor: _scalar(aten.add.Scalar),
    aten.sub.Tensor: _scalar(aten.sub.Scalar),
    aten.mul.Tensor: _scalar(aten.mul.Scalar),
    aten.div.Tensor: _scalar(aten.div.Scalar),
    aten.copy.default: _copy,
    aten.pad.default: _pad,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.l1_loss.default: _distance,
    aten.kl_div.default: _divergence,
    aten.scaled_dot_product_attention.default: _attention,
    attention: _masked_attention,
}  # fmt: skip
