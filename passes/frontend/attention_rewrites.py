"""Canonical forms of attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder
from ...ops.attention.blocks import Sight
from ...ops.attention.operator import IDS, attention
from ...ops.rank_local import dropout
from .document_ids import known_value, run_lengths
from .random_rewrites import random_calls

aten = torch.ops.aten


CHUNKS = "chunks"  # key of a node's meta: the number of positions of each document, or 0


def scaled_dot_product(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit quintnet.attention if there is no mask of the user's.

    With dropout, attention is written out: its mask is over (query, key), and no fused kernel takes one from outside.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if not arguments.get("dropout_p"):
        return _plain_attention(builder, arguments) or builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    call, query, key, val = builder.call, arguments["query"], arguments["key"], arguments["value"]
    if arguments.get("enable_gqa"):
        groups = shape(query)[-3] // shape(key)[-3]
        key, val = (call(aten.repeat_interleave.self_int, x, groups, len(shape(x)) - 3) for x in (key, val))
    scale = arguments.get("scale")
    scale = shape(query)[-1] ** -0.5 if scale is None else scale
    dims = list(range(len(shape(key))))
    scores = call(aten.matmul.default, query, call(aten.permute.default, key, [*dims[:-2], dims[-1], dims[-2]]))
    scores = call(aten.mul.Scalar, scores, scale)
    mask = arguments.get("attn_mask")
    if arguments.get("is_causal"):
        ones = call(aten.ones.default, list(shape(scores)[-2:]), dtype=torch.bool, device=value(scores).device)
        mask = call(aten.tril.default, ones)
    if mask is not None and value(mask).dtype == torch.bool:
        scores = call(aten.masked_fill.Scalar, scores, call(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = call(aten.add.Tensor, scores, mask)
    weights = call(aten._softmax.default, scores, len(dims) - 1, False)
    weights = call(dropout, weights, arguments["dropout_p"], op=random_calls(builder))
    return call(aten.matmul.default, weights, val)


def _plain_attention(builder: GraphBuilder, arguments: dict[str, Any]) -> fx.Node | None:
    """Return attention of [batch, heads, positions, features] if it has no mask and nothing broadcasts, else None."""
    names = ("query", "key", "value")
    tensors = [arguments[name] for name in names]
    q, k, v = map(shape, tensors)
    if len(q) == len(k) == len(v) == 3:  # [batch, positions, features]: one head
        with_heads = [builder.reshape(x, [shape(x)[0], 1, *shape(x)[1:]]) for x in tensors]
        out = _plain_attention(builder, arguments | dict(zip(names, with_heads, strict=True)))
        return out and builder.reshape(out, [*q[:2], v[2]])
    if arguments.get("attn_mask") is not None or len(q) != 4 or k[:3] != v[:3] or q[0] != k[0]:
        return None
    if q[1] != k[1] and not arguments.get("enable_gqa"):
        return None
    scale = arguments.get("scale")
    scale = q[-1] ** -0.5 if scale is None else scale
    return builder.call(attention, *tensors, scale=scale, mask=str(Sight(causal=bool(arguments.get("is_causal")))))


def masked_attention(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Simplify a mask: drop windows, chunks and documents that are as long as the sequence.

    Documents that the model's constants make equally long become chunks.
    """
    arguments = dict(zip(("q", "k", "v", *IDS), args, strict=False)) | kwargs
    length = shape(arguments["q"])[2]
    sight = Sight.parse(arguments["mask"]).within(length)
    if arguments.get("segments") is not None and not sight.chunk and (chunk := _chunks(arguments["segments"])):
        del arguments["segments"]
        sight = replace(sight, chunk=chunk).within(length)
    tensors = [arguments.get(name) for name in ("q", "k", "v", *IDS)]
    while tensors[-1] is None:
        tensors.pop()
    return builder.call(attention, *tensors, scale=arguments["scale"], mask=str(sight))


def _chunks(segments: fx.Node) -> int:
    """Return the number of positions of each document if it is the same for any batch, else 0.

    Hugging Face models derive ids from positions, which they make themselves if the user gives none.
    """
    if CHUNKS not in segments.meta:  # all blocks ask for the same node
        ids = known_value(segments, {})
        segments.meta[CHUNKS] = 0 if ids is None else _equal_documents(ids)
    return int(segments.meta[CHUNKS])


def _equal_documents(ids: Tensor) -> int:
    """Return the length of the documents, of which the last may be shorter; 0 if their lengths differ."""
    first, length = ids[0], ids.shape[1]
    if not bool((ids == first).all()) or not length:
        return 0
    sizes = run_lengths(first)
    begins = first[[0, *accumulate(sizes[:-1])]].tolist()
    return sizes[0] if {sizes[0]} >= {*sizes[:-1]} and sizes[-1] <= sizes[0] and len({*begins}) == len(begins) else 0
