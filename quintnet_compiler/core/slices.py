"""Slices of real tensors: the arithmetic behind ``S(dim, parts)``, shared by every transport and by state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .sharding import P, Shard, Sharding


def take(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """Rank ``index``'s slice of ``x`` under ``S(dim, parts)``; a view where ``parts`` is 1.

    >>> take(torch.arange(8), 0, 2, 2, 1)
    tensor([2, 3, 6, 7])
    """
    if parts == 1:
        size = x.shape[dim] // ranks
        return x.narrow(dim, index * size, size)
    return slot(x, dim, parts, ranks, index).flatten(dim, dim + 1)


def slot(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """Rank ``index``'s slice of ``x``, always a view, with ``dim`` as (parts, rest): to write to."""
    return torch.unflatten(x, dim, (parts, ranks, -1)).select(dim + 1, index)


def join(shards: Sequence[Tensor], dim: int, parts: int) -> Tensor:
    """The tensor whose slices (see :func:`take`) are ``shards``.

    >>> join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, 2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if parts == 1:
        return torch.cat(list(shards), dim)
    views = [torch.unflatten(shard, dim, (parts, -1)) for shard in shards]
    return torch.stack(views, dim + 1).flatten(dim, dim + 2)


def stack(x: Tensor, dim: int, parts: int, ranks: int) -> Tensor:
    """Every rank's slice of ``x`` along a new first dim; a view where ``parts`` is 1. As many operators for a thousand
    ranks as for two.

    >>> stack(torch.arange(8), 0, 2, 2)
    tensor([[0, 1, 4, 5],
            [2, 3, 6, 7]])
    """
    if parts == 1:
        view = torch.unflatten(x, dim, (ranks, -1))
        return view.movedim(dim, 0) if dim else view
    return torch.unflatten(x, dim, (parts, ranks, -1)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def unstack(x: Tensor, dim: int, parts: int) -> Tensor:
    """The tensor whose slices lie along the first dim of ``x``: the inverse of :func:`stack`.

    >>> unstack(torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]), 0, 2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if parts == 1:
        return (x.movedim(0, dim) if dim else x).flatten(dim, dim + 1)
    return torch.unflatten(x, dim + 1, (parts, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def pad(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """``x`` as rank ``index``'s slice of a full-sized tensor of zeros: the transpose of :func:`take`."""
    zero = torch.zeros_like(x)
    return join([x if rank == index else zero for rank in range(ranks)], dim, parts)


def take_all(x: Tensor, sharding: Sharding, ranks: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """One rank's part of the global tensor ``x``: each axis slices what the axes before it left."""
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            x = take(x, kind.dim, kind.parts, count, index)
    return x


def positions(
    sizes: Sequence[int],
    sharding: Sharding,
    ranks: Sequence[int],
    coordinate: Sequence[int],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """For each dim of a tensor of global shape ``sizes``, the global indices that one rank's part holds, made on
    ``device``.

    >>> positions((4, 2), (Shard(0),), (2,), (1,))
    [tensor([2, 3]), tensor([0, 1])]
    """
    found = [torch.arange(size, device=device) for size in sizes]
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            found[kind.dim] = take(found[kind.dim], 0, kind.parts, count, index)
    return found


def runs(size: int, parts: Sequence[int], ranks: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """The global indices that one rank holds of a dim of ``size``, as runs: the first index of each, and how many.
    Axes split what those before them left, each in ``parts``.

    >>> runs(8, (2,), (2,), (1,))
    [(2, 2), (6, 2)]
    """
    found = [(0, size)]
    for count, among, index in zip(parts, ranks, coordinate, strict=True):
        held = sum(length for _, length in found)
        part, own = held // count, held // count // among
        found = [run for at in range(count) for run in _between(found, at * part + index * own, own)]
    return found


def _between(held: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Of runs, what their elements ``first`` to ``first + count`` are."""
    found: list[tuple[int, int]] = []
    for start, length in held:
        low, high = max(first, 0), min(first + count, length)
        if low < high:
            found.append((start + low, high - low))
        first -= length
    return found


def assemble(parts: Mapping[tuple[int, ...], Tensor], sharding: Sharding, ranks: Sequence[int]) -> Tensor:
    """The global tensor of which ``parts`` are given by coordinate: slices joined (inner axes first), terms added.

    Where ranks hold the same, the first one stands for all; the others may be missing.
    """
    if not sharding:
        return parts[()]
    kind = sharding[0]
    inner = []
    for index in range(ranks[0]) if isinstance(kind, Shard) or kind is P else range(1):
        below = {place[1:]: part for place, part in parts.items() if place[0] == index}
        inner.append(assemble(below, sharding[1:], ranks[1:]))
    if isinstance(kind, Shard):
        return join(inner, kind.dim, kind.parts)
    total = inner[0]
    for term in inner[1:]:
        total = total + term
    return total
