"""Attention of the queries that a rank has, to all keys, without a mask in memory: for what :mod:`.operator` computes
where the mask would be large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.precision import widened
from ..define import define_operator
from .blocks import Block, Sight
from .kernels import Gradients
from .operator import IDS
from .tiles import AttentionInputs, AttentionTiles, Ids, Total

POSITIONS = 2  # the dim of positions in q, k and v


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty([*rows, v.shape[3]]), q.new_empty(rows, dtype=widened(q.dtype))


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


Runs = Sequence[tuple[int, int]]  # first position and length of each


def attend_runs(tiles: AttentionTiles, runs: Runs, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compute :data:`tiled_attention` of queries that are ``runs`` of positions."""
    k, v, at, results = inputs.k, inputs.v, 0, []
    for first, length in runs:
        mine = inputs.q.narrow(POSITIONS, at, length)
        total = Total(mine, v.shape[3])
        tiles.forward(Block(first, length, 0, k.shape[POSITIONS]), mine, k, v, inputs.ids, total)
        results.append(total.finished())
        at += length
    if len(results) == 1:
        return results[0]
    return SHIPPED.cat([out for out, _ in results], POSITIONS), SHIPPED.cat([lse for _, lse in results], POSITIONS)


def attend_runs_backward(
    tiles: AttentionTiles, runs: Runs, inputs: AttentionInputs, grad: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """Compute :data:`tiled_attention_backward` of queries that are ``runs`` of positions."""
    q, k, v = inputs.q, inputs.k, inputs.v
    wide = [SHIPPED.zeros(x.shape, dtype=widened(x.dtype), device=x.device) for x in (q, k, v)]
    at = 0
    for first, length in runs:
        grad_, q_, out_, lse_, of_q = (x.narrow(POSITIONS, at, length) for x in (grad, q, out, lse, wide[0]))
        block = Block(first, length, 0, k.shape[POSITIONS])
        tiles.backward(block, grad_, q_, out_, lse_, k, v, inputs.ids, (of_q, wide[1], wide[2]))
        at += length
    of_q, of_k, of_v = (x.to(q.dtype) for x in wide)
    return of_q, of_k, of_v


def _attend(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """Compute the attention of all positions, which no axis splits, so that no rank is needed."""
    return attend_runs(*_whole(how), AttentionInputs(q, k, v, Ids(*how[: len(IDS)])))


def _attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any) -> Gradients:
    return attend_runs_backward(*_whole(how), AttentionInputs(q, k, v, Ids(*how[: len(IDS)])), grad, out, lse)


def _whole(how: Sequence[Any]) -> tuple[AttentionTiles, Runs]:
    scale, mask, tile_bytes, whole, axes, *_ = how[len(IDS) :]
    if axes:
        raise RuntimeError(f"positions are split over {', '.join(axes)}: which of them are here, a rank knows")
    return AttentionTiles(scale, Sight.parse(mask), tile_bytes), [(0, whole)]


# As attention: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], and ids of positions [B, T]. The queries are
# this rank's part of positions, of which there are ``whole`` and which ``axes`` split in ``parts``. Returns each
# query's log of its sum of exponentials too, [B, H, S], for the backward.
_HOW = (
    "Tensor? padding, Tensor? segments, Tensor? groups, float scale, str mask, int tile_bytes, int whole, str[] axes, "
    "int[] sizes, int[] parts"
)
tiled_attention = define_operator(
    f"tiled_attention(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)", _shapes, _attend
)
tiled_attention_backward = define_operator(
    f"tiled_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW}) -> "
    "(Tensor, Tensor, Tensor)",
    _gradients,
    _attend_backward,
)


def working_bytes(
    q: Tensor, k: Tensor, v: Tensor, padding: object, segments: object, groups: object, scale: float, mask: str,
    tile_bytes: int, *_: object,
) -> int:  # fmt: skip
    """Return the bytes that :data:`tiled_attention` takes while it runs, beyond its result.

    In a wide dtype, the sum so far (or a term of that size, where the sum is the result) and the weighted term; a tile,
    and its mask.
    """
    return 2 * q.shape[:3].numel() * v.shape[3] * widened(q.dtype).itemsize + 2 * tile_bytes


def backward_working_bytes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, padding: object, segments: object,
    groups: object, scale: float, mask: str, tile_bytes: int, *_: object,
) -> int:  # fmt: skip
    """Return the same of the backward: three sums of gradients, or terms if those are the result; a tile, its mask."""
    return sum(x.numel() for x in (q, k, v)) * widened(q.dtype).itemsize + 2 * tile_bytes
