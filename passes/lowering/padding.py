"""What a rank holds of a size that does not divide: where padding arises, and where it is replaced.

A rank's part of a dim of n over k ranks has room for ceil(n / k), so that all ranks of a stage run one program. What an
operator makes of padding is never looked at, and may be anything (0 / 0 is NaN): as long as an operator works on each
index of a factor alone, padding stays padding. Where it brings indices together, in the forward or in its backward,
padding is zeros first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ...core.annotations import is_float, needs_grad, shape, tensor_inputs, value, values
from ...core.sharding import Shard, Sharding, shard_shape
from ...ir.builder import GraphBuilder
from ...ir.program import Axis, Strategy
from ...ops.derivatives.user_derivatives import arrives, declare_gradient, with_tangent
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rank_local import LOOKUPS, padding_of
from ...ops.rules.notation import Dims, Factors
from ...ops.scaled_products import block_max, scaled_cast
from ..strategies.rule_book import refine

aten = torch.ops.aten
# of 0 they make 0, and their derivative there is finite
_OF_ZERO = frozenset(
    {
        aten.gelu.default, aten.silu.default, aten.relu.default, aten.tanh.default, aten.square.default,
        aten.mul.Tensor, aten._to_copy.default,
    }
)  # fmt: skip
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ROWS = LOOKUPS | EXPERT_LAYERS  # read rows that ids name, which are none of padding


def padded_dims(sizes: Sequence[int], sharding: Sharding, axes: Sequence[Axis]) -> frozenset[int]:
    """The dims of which a rank's part of a tensor of shape ``sizes`` has padding.

    >>> padded_dims((7, 4), (Shard(0),), (Axis("dp", 2, "data"),))
    frozenset({0})
    """
    found, left = set[int](), tuple(sizes)
    for kind, axis in zip(sharding, axes, strict=True):
        if isinstance(kind, Shard) and kind.padded(left[kind.dim], axis.size) != left[kind.dim]:
            found.add(kind.dim)
        left = shard_shape(left, kind, axis.size)
    return frozenset(found)


@dataclass(frozen=True)
class Mixed:
    """Of an operator on ranks: for each input the dims whose padding must be zeros before it is read (``ones``: ones,
    as it might divide by it), and for each output those whose gradient must be zeros. ``own``: for each input the dims
    in whose padding a gradient would arise that is not zero, which a parameter must not have. ``alone``: whether every
    factor with padding is in all inputs and outputs, so that the padding of a result is made of padding."""

    inputs: tuple[frozenset[int], ...]
    ones: tuple[frozenset[int], ...]
    outputs: tuple[frozenset[int], ...]
    own: tuple[frozenset[int], ...]
    alone: bool

    @property
    def anything(self) -> bool:
        """Whether the operator brings padding together with anything."""
        return any(self.inputs) or any(self.ones) or any(self.outputs)


def mixed(node: fx.Node, factors: Factors, chosen: Sequence[Strategy], axes: Sequence[Axis]) -> Mixed:
    """The dims of a factor with padding that an input or an output of ``node`` lacks: the operator, or its backward,
    adds up over it. An index must be one even where nothing is added up."""
    inputs: list[set[int]] = [set() for _ in factors.inputs]
    outputs: list[set[int]] = [set() for _ in factors.outputs]
    own: list[set[int]] = [set() for _ in factors.inputs]
    ones: list[set[int]] = [set() for _ in factors.inputs]
    broadcasts = factors.product is None and not factors.whole and not factors.additive
    made, alone = [needs_grad(node) and is_float(x) for x in values(node)], True
    for strategy, axis in zip(chosen, axes, strict=True):
        for name in (name for name, unit in strategy.units if unit):
            read = [_dim(dims, name) for dims in factors.inputs[: len(arrives(node))]]
            written = [_dim(dims, name) for dims in factors.outputs]
            every = None not in (*read, *written)
            alone = alone and every
            if node.target is declare_gradient:  # a parameter's own padding has no other gradient than zeros
                inputs[1].update(dim for dim in read[1:] if dim is not None)
                continue
            # the others look at their padding themselves
            if name in factors.settled and node.target is not block_max:
                continue
            times = sum(dim is not None for dim in read)
            for position, dim in enumerate(read):
                if dim is None:
                    continue
                if not every and None not in written and broadcasts and not _linear_in(factors, position):
                    ones[position].add(dim)
                elif not every or (_picks(node, position) and (factors.whole or any(map(is_float, values(node))))):
                    inputs[position].add(dim)
                if every or (None in written and times < 2 and node.target not in _ROWS):
                    own[position].add(dim)
            for position, dim in enumerate(written):
                if dim is not None and not every and made[position]:
                    outputs[position].add(dim)
        factors = refine(factors, strategy, axis.size)
    found = [tuple(map(frozenset, dims)) for dims in (inputs, ones, outputs, own)]
    return Mixed(found[0], found[1], found[2], found[3], alone)


def _linear_in(factors: Factors, position: int) -> bool:
    return any(position in group for group in factors.linear)


def _picks(node: fx.Node, position: int) -> bool:
    """Whether an input is whole numbers, which may be indices."""
    dtype = value(tensor_inputs(node)[position]).dtype
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def _dim(dims: Dims, name: str) -> int | None:
    return next((d for d, names in enumerate(dims) if name in names), None)


@dataclass
class Padding:
    """Puts padding in a rank's program, and zeros in its place. ``zeros``: the dims of a node whose padding surely is
    zeros; ``made``: which were put in the place of what, for users in ``stage``; ``places``: which places of a dim are
    padding."""

    builder: GraphBuilder
    axes: Sequence[Axis]
    stage: int | None = None
    zeros: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    made: dict[tuple[fx.Node, frozenset[int], float, int | None], fx.Node] = field(default_factory=dict)
    places: dict[Hashable, fx.Node] = field(default_factory=dict)

    def filled(
        self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dims: frozenset[int], fill: float = 0.0
    ) -> fx.Node:
        """``x``, the local part of a value of shape ``sizes``, with ``fill`` in the padding of ``dims``; gradients of
        padding are zeros, too."""
        if not dims:
            return x
        key = (x, dims, fill, self.stage)
        if key in self.made:
            return self.made[key]
        known, made = self.zeros.get(x, frozenset()), x
        for dim in sorted(dims):
            where = self._where(x, sizes, sharding, dim)
            if value(x).is_floating_point() and value(x).itemsize == 1:  # which masked_fill does not know
                made = self.builder.call(aten.where.ScalarSelf, where, fill, made)
            else:
                made = self.builder.call(aten.masked_fill.Scalar, made, where, fill)
        self.made[key] = made
        if not fill:
            self.zeros[made] = known | dims
        return made

    def _where(self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dim: int) -> fx.Node:
        cuts = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, kind in zip(self.axes, sharding, strict=True)
            if isinstance(kind, Shard) and kind.dim == dim
        ]
        count, columns = shape(x)[dim], [list(column) for column in zip(*cuts, strict=True)]
        key = (count, sizes[dim], *cuts)
        if key not in self.places:
            self.places[key] = self.builder.call(padding_of, count, sizes[dim], *columns, value(x).device)
        found = self.places[key]
        return self.builder.reshape(found, [count, *[1] * (len(shape(x)) - dim - 1)])

    def extended(self, x: fx.Node, dim: int, parts: int, size: int, *, padded: bool) -> fx.Node:
        """``x`` with zeros at the end of each of its ``parts``: ``size`` indices in ``dim``. ``padded``: whether the
        dim has padding of another axis already, which stays what it is."""
        have = shape(x)[dim]
        if have == size:
            return x
        behind = len(shape(x)) - 1 - dim
        view = self._in_parts(x, dim, parts)
        widths = [0] * (2 * behind) + [0, (size - have) // parts]
        made = self.builder.call(aten.constant_pad_nd.default, view, widths)
        made = self._of_parts(made, shape(x), dim, size)
        self.zeros[made] = self.zeros.get(x, frozenset()) | (frozenset() if padded else {dim})
        return made

    def trimmed(self, x: fx.Node, dim: int, parts: int, size: int) -> fx.Node:
        """``x`` without the end of each of its ``parts``: ``size`` indices in ``dim``."""
        if shape(x)[dim] == size:
            return x
        view = self._in_parts(x, dim, parts)
        at = dim if parts == 1 else dim + 1
        made = self.builder.call(aten.slice.Tensor, view, at, 0, size // parts)
        made = self._of_parts(made, shape(x), dim, size)
        self.zeros[made] = self.zeros.get(x, frozenset()) - {dim}
        return made

    def _in_parts(self, x: fx.Node, dim: int, parts: int) -> fx.Node:
        size = shape(x)
        return x if parts == 1 else self.builder.reshape(x, [*size[:dim], parts, size[dim] // parts, *size[dim + 1 :]])

    def _of_parts(self, x: fx.Node, before: Sequence[int], dim: int, size: int) -> fx.Node:
        return self.builder.reshape(x, [*before[:dim], size, *before[dim + 1 :]])

    def moved(self, x: fx.Node, made: fx.Node) -> None:
        """``made`` is ``x`` after a conversion of ranks: zeros move with it."""
        self.zeros.setdefault(made, self.zeros.get(x, frozenset()))

    def passed_on(self, node: fx.Node, factors: Factors, read: Iterable[tuple[fx.Node, frozenset[int]]]) -> bool:
        """Whether an operator that brings nothing together makes zeros of zeros, and reads them in all padding.
        ``read``: its local inputs, and which dims of them have padding."""
        linear = factors.linear == ((0,),) and len(factors.inputs) == 1
        linear = linear and node.target is not with_tangent  # which also returns a gradient
        if node.target is scaled_cast:  # whatever the scale
            linear, read = True, list(read)[:1]
        sums = node.target in _SUMS and len(factors.inputs) == 2  # and no number
        return (linear or sums or node.target in _OF_ZERO) and all(
            self.zeros.get(x, frozenset()) >= dims for x, dims in read
        )
