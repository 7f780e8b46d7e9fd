"""Slices of real tensors: the arithmetic behind ``S(dim, parts, unit)``, shared by every transport and by state.

Transports know even slices alone. Where a size does not divide, it is made longer before it is cut
(:func:`extended`), and as long as it was after it is joined (:func:`trimmed`); padding is at the end of each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .sharding import P, Shard, Sharding, shard_shape


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


def extended(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    """``x`` with ``size`` indices in ``dim``, of which those that it lacks are zeros at the end of each of its parts;
    ``x`` itself if it lacks none.

    >>> extended(torch.tensor([1, 2, 3, 4]), 0, 2, 6)
    tensor([1, 2, 0, 3, 4, 0])
    """
    if x.shape[dim] == size:
        return x
    view = torch.unflatten(x, dim, (parts, -1))
    longer = view.new_zeros([*view.shape[: dim + 1], size // parts, *view.shape[dim + 2 :]])
    longer.narrow(dim + 1, 0, view.shape[dim + 1]).copy_(view)
    return longer.flatten(dim, dim + 1)


def trimmed(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    """``x`` without the end of each of its parts, so that ``size`` indices in ``dim`` are left: the inverse of
    :func:`extended`.

    >>> trimmed(torch.tensor([1, 2, 0, 3, 4, 0]), 0, 2, 4)
    tensor([1, 2, 3, 4])
    """
    if x.shape[dim] == size:
        return x
    if parts == 1:
        return x.narrow(dim, 0, size)
    view = torch.unflatten(x, dim, (parts, -1))
    return view.narrow(dim + 1, 0, size // parts).flatten(dim, dim + 1)


def take_all(x: Tensor, sharding: Sharding, ranks: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """One rank's part of the global tensor ``x``, with zeros where it is padding: each axis slices what the axes before
    it left."""
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            x = extended(x, kind.dim, kind.parts, kind.padded(x.shape[kind.dim], count))
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
    ``device``; -1 where it is padding.

    >>> positions((4, 2), (Shard(0),), (2,), (1,)), positions((3,), (Shard(0),), (2,), (1,))
    ([tensor([2, 3]), tensor([0, 1])], [tensor([ 2, -1])])
    """
    numbers = [torch.arange(1, size + 1, device=device) for size in sizes]  # 0: padding
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            longer = extended(numbers[kind.dim], 0, kind.parts, kind.padded(len(numbers[kind.dim]), count))
            numbers[kind.dim] = take(longer, 0, kind.parts, count, index)
    return [one - 1 for one in numbers]


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


def assemble(
    parts: Mapping[tuple[int, ...], Tensor], sharding: Sharding, ranks: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """The tensor of global ``shape`` of which ``parts`` are given by coordinate: slices joined (inner axes first)
    without their padding, terms added.

    Where ranks hold the same, the first one stands for all; the others may be missing.
    """
    if not sharding:
        return parts[()]
    kind, left = sharding[0], shard_shape(shape, sharding[0], ranks[0])
    inner = []
    for index in range(ranks[0]) if isinstance(kind, Shard) or kind is P else range(1):
        below = {place[1:]: part for place, part in parts.items() if place[0] == index}
        inner.append(assemble(below, sharding[1:], ranks[1:], left))
    if isinstance(kind, Shard):
        return trimmed(join(inner, kind.dim, kind.parts), kind.dim, kind.parts, shape[kind.dim])
    total = inner[0]
    for term in inner[1:]:
        total = total + term
    return total
