"""How :mod:`.normalize` spells attention."""

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


CHUNKS = "chunks"  # in a node's meta: how many positions each of these documents has, or 0


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
    return builder.call(attention, *tensors, scale=scale, mask=str(Sight(causal=bool(given.get("is_causal")))))


def masked_attention(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Windows and chunks as long as the sequence are none. Documents that the model's constants say are equally long
    are chunks, and one document is none."""
    given = dict(zip(("q", "k", "v", *IDS), args, strict=False)) | kwargs
    length = shape(given["q"])[2]
    sight = Sight.parse(given["mask"]).within(length)
    if given.get("segments") is not None and not sight.chunk and (chunk := _chunks(given["segments"])):
        del given["segments"]
        sight = replace(sight, chunk=chunk).within(length)
    tensors = [given.get(name) for name in ("q", "k", "v", *IDS)]
    while tensors[-1] is None:
        tensors.pop()
    return builder.call(attention, *tensors, scale=given["scale"], mask=str(sight))


def _chunks(segments: fx.Node) -> int:
    """How many positions each document has, where that is the same for any batch: Hugging Face models derive ids from
    positions, which they make themselves where the user gives none. 0: it is not."""
    if CHUNKS not in segments.meta:  # all blocks ask for the same
        found = known_value(segments, {})
        segments.meta[CHUNKS] = 0 if found is None else _equal_documents(found)
    return int(segments.meta[CHUNKS])


def _equal_documents(ids: Tensor) -> int:
    """The length of each of the documents, the last of which may be shorter; 0 where they are not equal."""
    first, length = ids[0], ids.shape[1]
    if not bool((ids == first).all()) or not length:
        return 0
    sizes = run_lengths(first)
    begins = first[[0, *accumulate(sizes[:-1])]].tolist()
    return sizes[0] if {sizes[0]} >= {*sizes[:-1]} and sizes[-1] <= sizes[0] and len({*begins}) == len(begins) else 0
