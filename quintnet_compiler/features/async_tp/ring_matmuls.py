"""Products with slices that are passed around a ring: one is multiplied while the next is sent (Wang et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...runtime.transport.ring import Circle


@dataclass(frozen=True)
class Factor:
    """The weight [in, out] (or ``transposed``: [out, in]) and the bias [out], or None, of a linear layer."""

    weight: Tensor
    bias: Tensor | None
    transposed: bool

    @property
    def matrix(self) -> Tensor:
        """Return the weight as [in, out]."""
        return self.weight.t() if self.transposed else self.weight

    def write(self, x: Tensor, into: Tensor) -> None:
        """Set ``into`` [..., out] to ``x`` [..., in] times the weight, plus the bias."""
        rows = x.reshape(-1, x.shape[-1])
        direct = into.is_contiguous()
        out = into.view(-1, into.shape[-1]) if direct else into.new_empty((len(rows), into.shape[-1]))
        if self.bias is None:
            SHIPPED.mm(rows, self.matrix, out=out)
        else:
            SHIPPED.addmm(self.bias, rows, self.matrix, out=out)
        if not direct:
            into.copy_(out.view(into.shape))


def factors(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], transposed: Sequence[bool]
) -> tuple[Factor, ...]:
    """Return the factors of these columns."""
    return tuple(Factor(*columns) for columns in zip(weights, biases, transposed, strict=True))


def all_gather_matmul(
    circle: Circle, x: Tensor, dim: int, parts: int, factors: Sequence[Factor], keep: bool
) -> tuple[Tensor, ...]:
    """Return the products of all ranks' ``x``, gathered as ``S(dim, parts)``, and with ``keep`` the gathered value."""
    shape = [n * circle.size if d == dim else n for d, n in enumerate(x.shape)]
    products = [x.new_empty((*shape[:-1], factor.matrix.shape[1])) for factor in factors]
    whole = x.new_empty(shape) if keep else None
    pieces = [x.contiguous()]
    for step in range(circle.size):
        wait = circle.passed(pieces) if step < circle.size - 1 else None
        owner = (circle.index - step) % circle.size
        piece = SHIPPED.unflatten(pieces[0], dim, (parts, -1))
        for factor, out in zip(factors, products, strict=True):
            factor.write(piece, slices.slot(out, dim, parts, circle.size, owner))
        if whole is not None:
            slices.slot(whole, dim, parts, circle.size, owner).copy_(piece)
        if wait is not None:
            pieces = wait()
    return (*products, whole) if whole is not None else tuple(products)


def matmul_reduce_scatter(
    circle: Circle, xs: Sequence[Tensor], dim: int, parts: int, factors: Sequence[Factor]
) -> Tensor:
    """Return this rank's slice, as ``S(dim, parts)``, of the sum over ranks and ``xs`` of products with the factors.

    The sum of a slice is passed around the ring to its owner, and each rank on the way adds its own term.
    """
    arriving: Callable[[], list[Tensor]] | None = None
    for step in range(circle.size):
        owner = (circle.index - 1 - step) % circle.size
        total = _sum([slices.slice_of_rank(x, dim, parts, circle.size, owner) for x in xs], factors)
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
        term = SHIPPED.empty_like(total)
        factor.write(x, term)
        total += term
    return total
