"""Products fused with collectives, as ranks run them: by PyTorch's kernels where there are some, or in a ring."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...runtime.execute.comm import Comm
from . import ring_matmuls
from .ring_matmuls import factors
from .symmetric_memory import kernels_of


def all_gather_matmul(
    comm: Comm,
    x: Tensor,
    axis: str,
    dim: int,
    parts: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    keep: bool,
    at: int,
) -> tuple[Tensor, ...]:
    """Return products with the all-gathered ``x``, and with ``keep`` that, too."""
    matrices = factors(weights, biases, transposed)
    kernels = comm.transport.kernels(axis, x.device, kernels_of)
    fused = kernels.all_gather_matmul(x, dim, parts, matrices, keep) if kernels is not None else None
    if fused is not None:
        return fused
    return ring_matmuls.all_gather_matmul(comm.circle(axis, at), x, dim, parts, matrices, keep)


def matmul_reduce_scatter(
    comm: Comm,
    xs: Sequence[Tensor],
    axis: str,
    dim: int,
    parts: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    transposed: Sequence[bool],
    at: int,
) -> Tensor:
    """Return this rank's slice of the sum of products over the ranks of ``axis``."""
    matrices = factors(weights, biases, transposed)
    kernels = comm.transport.kernels(axis, xs[0].device, kernels_of)
    fused = kernels.matmul_reduce_scatter(xs, dim, parts, matrices) if kernels is not None else None
    if fused is not None:
        return fused
    return ring_matmuls.matmul_reduce_scatter(comm.circle(axis, at), xs, dim, parts, matrices)
