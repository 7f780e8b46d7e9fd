"""How :mod:`.normalize` spells attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder
from ...ops.attention import attention
from ...ops.rank_local import dropout
from .random_rewrites import random_calls

aten = torch.ops.aten


ONE_DOCUMENT = "one_document"  # in a node's meta: whether these ids of documents are the same everywhere


def scaled_dot_product(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
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
    weights = call(dropout, weights, given["dropout_p"], op=random_calls(builder))
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


def masked_attention(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
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
