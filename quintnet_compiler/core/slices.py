"""Slices of real tensors: the arithmetic of ``S(dim, parts, unit)``, shared by every transport and by state.

Transports know even slices only. Where a size does not divide, the tensor is padded before it is cut
(:func:`extended`), and trimmed after it is joined (:func:`trimmed`); padding is at the end of each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..compat.torch_codegen import SHIPPED
from .sharding import P, Shard, Sharding, shard_shape


def slice_of_rank(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """Return rank ``index``'s slice of ``x`` under ``S(dim, parts)``; a view where ``parts`` is 1.

    >>> slice_of_rank(torch.arange(8), 0, 2, 2, 1)
    tensor([2, 3, 6, 7])
    """
    if parts == 1:
        size = x.shape[dim] // ranks
        return x.narrow(dim, index * size, size)
    return slot(x, dim, parts, ranks, index).flatten(dim, dim + 1)


def slot(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """Return rank ``index``'s slice of ``x``, always a view, with ``dim`` as (parts, rest): to write to."""
    return SHIPPED.unflatten(x, dim, (parts, ranks, -1)).select(dim + 1, index)


def join(shards: Sequence[Tensor], dim: int, parts: int) -> Tensor:
    """Return the tensor whose slices (see :func:`slice_of_rank`) are ``shards``.

    >>> join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], 0, 2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if parts == 1:
        return SHIPPED.cat(list(shards), dim)
    views = [SHIPPED.unflatten(shard, dim, (parts, -1)) for shard in shards]
    return SHIPPED.stack(views, dim + 1).flatten(dim, dim + 2)


def stack(x: Tensor, dim: int, parts: int, ranks: int) -> Tensor:
    """Return every rank's slice of ``x`` along a new first dim; a view where ``parts`` is 1.

    The number of operators does not depend on the number of ranks.

    >>> stack(torch.arange(8), 0, 2, 2)
    tensor([[0, 1, 4, 5],
            [2, 3, 6, 7]])
    """
    if parts == 1:
        view = SHIPPED.unflatten(x, dim, (ranks, -1))
        return view.movedim(dim, 0) if dim else view
    return SHIPPED.unflatten(x, dim, (parts, ranks, -1)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def unstack(x: Tensor, dim: int, parts: int) -> Tensor:
    """Return the tensor whose slices lie along the first dim of ``x``: the inverse of :func:`stack`.

    >>> unstack(torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]]), 0, 2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if parts == 1:
        return (x.movedim(0, dim) if dim else x).flatten(dim, dim + 1)
    return SHIPPED.unflatten(x, dim + 1, (parts, -1)).movedim(0, dim + 1).flatten(dim, dim + 2)


def pad(x: Tensor, dim: int, parts: int, ranks: int, index: int) -> Tensor:
    """Return ``x`` as rank ``index``'s slice of a whole tensor of zeros: the transpose of :func:`slice_of_rank`."""
    zero = SHIPPED.zeros_like(x)
    return join([x if rank == index else zero for rank in range(ranks)], dim, parts)


def extended(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    """Pad each part of ``dim`` with zeros at its end, so that ``dim`` has ``size`` indices in all.

    Returns ``x`` itself if it has that size.

    >>> extended(torch.tensor([1, 2, 3, 4]), 0, 2, 6)
    tensor([1, 2, 0, 3, 4, 0])
    """
    if x.shape[dim] == size:
        return x
    view = SHIPPED.unflatten(x, dim, (parts, -1))
    longer = view.new_zeros([*view.shape[: dim + 1], size // parts, *view.shape[dim + 2 :]])
    longer.narrow(dim + 1, 0, view.shape[dim + 1]).copy_(view)
    return longer.flatten(dim, dim + 1)


def trimmed(x: Tensor, dim: int, parts: int, size: int) -> Tensor:
    """Cut the end of each part of ``dim``, so that ``dim`` has ``size`` indices in all.

    It is the inverse of :func:`extended`.

    >>> trimmed(torch.tensor([1, 2, 0, 3, 4, 0]), 0, 2, 4)
    tensor([1, 2, 3, 4])
    """
    if x.shape[dim] == size:
        return x
    if parts == 1:
        return x.narrow(dim, 0, size)
    view = SHIPPED.unflatten(x, dim, (parts, -1))
    return view.narrow(dim + 1, 0, size // parts).flatten(dim, dim + 1)


def take_all(x: Tensor, sharding: Sharding, ranks: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """Return one rank's part of the global tensor ``x``, padded with zeros.

    Each axis slices the result of the axes before it.
    """
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            x = extended(x, kind.dim, kind.parts, kind.padded(x.shape[kind.dim], count))
            x = slice_of_rank(x, kind.dim, kind.parts, count, index)
    return x


def positions(
    sizes: Sequence[int],
    sharding: Sharding,
    ranks: Sequence[int],
    coordinate: Sequence[int],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Return, for each dim of a tensor of global shape ``sizes``, the global indices of one rank's part.

    The tensors are on ``device``; -1 stands for padding.

    >>> positions((4, 2), (Shard(0),), (2,), (1,)), positions((3,), (Shard(0),), (2,), (1,))
    ([tensor([2, 3]), tensor([0, 1])], [tensor([ 2, -1])])
    """
    numbers = [SHIPPED.arange(1, size + 1, device=device) for size in sizes]  # 0: padding
    for kind, count, index in zip(sharding, ranks, coordinate, strict=True):
        if isinstance(kind, Shard):
            longer = extended(numbers[kind.dim], 0, kind.parts, kind.padded(len(numbers[kind.dim]), count))
            numbers[kind.dim] = slice_of_rank(longer, 0, kind.parts, count, index)
    return [number - 1 for number in numbers]


def runs(size: int, parts: Sequence[int], ranks: Sequence[int], coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Return the global indices that one rank holds of a dim of ``size``, as runs (first index, length).

    Each axis splits the result of the axes before it, in ``parts`` of its own.

    >>> runs(8, (2,), (2,), (1,))
    [(2, 2), (6, 2)]
    """
    local_runs = [(0, size)]
    for num_parts, num_ranks, index in zip(parts, ranks, coordinate, strict=True):
        part_size = sum(length for _, length in local_runs) // num_parts
        slice_size = part_size // num_ranks
        starts = [part * part_size + index * slice_size for part in range(num_parts)]
        local_runs = [run for start in starts for run in _between(local_runs, start, slice_size)]
    return local_runs


def _between(index_runs: Sequence[tuple[int, int]], first: int, count: int) -> list[tuple[int, int]]:
    """Return the runs of elements ``first`` to ``first + count`` of ``index_runs``."""
    selected: list[tuple[int, int]] = []
    for start, length in index_runs:
        low, high = max(first, 0), min(first + count, length)
        if low < high:
            selected.append((start + low, high - low))
        first -= length
    return selected


def assemble(
    parts: Mapping[tuple[int, ...], Tensor], sharding: Sharding, ranks: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Join ``parts``, by coordinate, into the tensor of global ``shape``.

    Slices are joined (inner axes first) and their padding is cut; partial terms are added. Where ranks hold the same,
    the first one stands for all; the others may be missing.
    """
    if not sharding:
        return parts[()]
    kind, inner_shape = sharding[0], shard_shape(shape, sharding[0], ranks[0])
    inner = []
    for index in range(ranks[0]) if isinstance(kind, Shard) or kind is P else range(1):
        inner_parts = {coordinate[1:]: part for coordinate, part in parts.items() if coordinate[0] == index}
        inner.append(assemble(inner_parts, sharding[1:], ranks[1:], inner_shape))
    if isinstance(kind, Shard):
        return trimmed(join(inner, kind.dim, kind.parts), kind.dim, kind.parts, shape[kind.dim])
    total = inner[0]
    for term in inner[1:]:
        total = total + term
    return total
