"""Products with slices that travel around a ring: one is multiplied while the next is on its way (Wang et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import slices
from .ring import Circle


@dataclass(frozen=True)
class Factor:
    """What rows are multiplied by: a weight [in, out] (or ``transposed``: [out, in]), and a bias or None."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool

    @property
    def matrix(self) -> Tensor:
        """The weight as [in, out]."""
        return self.weight.t() if self.transposed else self.weight

    def write(self, x: Tensor, into: Tensor) -> None:
        """``into`` [..., out] = ``x`` [..., in] times the weight."""
        rows = x.reshape(-1, x.shape[-1])
        direct = into.is_contiguous()
        out = into.view(-1, into.shape[-1]) if direct else into.new_empty((len(rows), into.shape[-1]))
        if self.bias is None:
            torch.mm(rows, self.matrix, out=out)
        else:
            torch.addmm(self.bias, rows, self.matrix, out=out)
        if not direct:
            into.copy_(out.view(into.shape))


def factors(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: Sequence[bool]
) -> tuple[Factor, ...]:
    return tuple(Factor(*each) for each in zip(weights, biases, transposed, strict=True))


def all_gather_matmul(
    circle: Circle, x: Tensor, dim: int, parts: int, factors: Sequence[Factor], keep: bool
) -> tuple[Tensor, ...]:
    """Each factor's product with what joins all ranks' ``x`` as ``S(dim, parts)``, and (``keep``) that itself."""
    shape = [n * circle.size if d == dim else n for d, n in enumerate(x.shape)]
    made = [x.new_empty((*shape[:-1], factor.matrix.shape[1])) for factor in factors]
    whole = x.new_empty(shape) if keep else None
    here = [x.contiguous()]
    for step in range(circle.size):
        coming = circle.passed(here) if step < circle.size - 1 else None
        owner = (circle.index - step) % circle.size
        piece = torch.unflatten(here[0], dim, (parts, -1))
        for factor, out in zip(factors, made, strict=True):
            factor.write(piece, slices.slot(out, dim, parts, circle.size, owner))
        if whole is not None:
            slices.slot(whole, dim, parts, circle.size, owner).copy_(piece)
        if coming is not None:
            here = coming()
    return (*made, whole) if whole is not None else tuple(made)


def matmul_reduce_scatter(
    circle: Circle, xs: Sequence[Tensor], dim: int, parts: int, factors: Sequence[Factor]
) -> Tensor:
    """This rank's slice, as ``S(dim, parts)``, of the sum over ranks of each of ``xs`` times its factor. A slice's sums
    travel to the rank that it belongs to, and each rank that they visit adds its own."""
    arriving: Callable[[], list[Tensor]] | None = None
    for step in range(circle.size):
        owner = (circle.index - 1 - step) % circle.size
        total = _sum([slices.take(x, dim, parts, circle.size, owner) for x in xs], factors)
        if arriving is not None:
            total += arriving()[0]
        if step < circle.size - 1:
            arriving = circle.passed([total])
    return total


def _sum(xs: Sequence[Tensor], factors: Sequence[Factor]) -> Tensor:
    columns = factors[0].matrix.shape[1]
    total = xs[0].new_empty((*xs[0].shape[:-1], columns))
    factors[0].write(xs[0], total)
    for x, factor in zip(xs[1:], factors[1:], strict=True):
        term = torch.empty_like(total)
        factor.write(x, term)
        total += term
    return total
