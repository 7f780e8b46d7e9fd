"""Operators of hot experts, as a rank carries them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ...runtime.execute.comm import Comm


def pick_experts(
    comm: Comm, x: Tensor, hot: Sequence[int], own: int, axes: Sequence[str], sizes: Sequence[int], at: int
) -> Tensor:
    """Return [len(hot), ...]: the rows of ``x`` of hot experts that this rank stores, zeros for the others."""
    rows = x.new_zeros([len(hot), *x.shape[1:]])
    for row, local in _stored(hot, own, comm.part_index(axes, sizes)):
        rows[row] = x[local]
    return rows


def place_experts(
    comm: Comm, x: Tensor, hot: Sequence[int], own: int, axes: Sequence[str], sizes: Sequence[int], at: int
) -> Tensor:
    """Return [own, ...], the transpose of ``pick_experts``: zeros for experts of this rank that are not hot."""
    rows = x.new_zeros([own, *x.shape[1:]])
    for row, local in _stored(hot, own, comm.part_index(axes, sizes)):
        rows[local] = x[row]
    return rows


def _stored(hot: Sequence[int], own: int, part: int) -> Iterator[tuple[int, int]]:
    """Yield the hot experts that a rank stores: each index in ``hot``, and that among the rank's ``own`` experts."""
    for row, expert in enumerate(hot):
        if 0 <= expert - part * own < own:
            yield row, expert - part * own
