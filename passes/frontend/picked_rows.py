"""Rows that forward picks by value (``where(mask)``, ``nonzero``, ``x[mask]``), as all rows and a mask.

A mixture of experts in plain PyTorch picks the rows of each expert, computes on those, and adds or writes the result
back. How many there are depends on values; what becomes of one row does not depend on which others there are. So::

    rows, way = torch.where(ids == e)               # [u], [u] of [N, K]
    h = expert(x[rows]) * w[rows, way, None]        # [u, D]
    out.index_add_(0, rows, h)

is computed for all positions of the mask, and what is not picked adds nothing. A value that depends on some coordinates
of the positions alone is computed for these: the experts for N rows, and not for N * K. That each operator in between
computes every row on its own is what its sharding rule says: it may be split over that dim.

Rows that are not picked are zeros, whatever is there (``x[x.isfinite()]``), and get no gradient. An operator that may
make no number of a zero (a logarithm) is between two masks, which hide its result and its derivative there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from ...capture.sizes_by_value import PICKS, shape_by_value
from ...compat.torch import free_unbacked_symbols, pytree
from ...core.annotations import is_getitem, needs_grad, origin, shape, tensor_inputs, value
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder
from ...ops.derivatives.inner_gradients import gradient
from ...ops.rank_local import dropout, noise
from ...ops.rules.table import RULES

aten = torch.ops.aten
_SAME = (
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten.reshape.default, aten.flatten.using_ints,
)  # fmt: skip
# of finite values they, and their derivatives, are finite
_TAME = frozenset((
    *_SAME, operator.getitem, aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default,
    aten.bmm.default, aten.einsum.default, aten.conv1d.default, aten.conv2d.default, aten.add.Tensor, aten.sub.Tensor,
    aten.mul.Tensor, aten.neg.default, aten.abs.default, aten.square.default, aten.tanh.default, aten.sigmoid.default,
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.elu.default, aten.leaky_relu.default,
    aten.mish.default, aten.hardtanh.default, aten.hardswish.default, aten.hardsigmoid.default, aten.sin.default,
    aten.cos.default, aten.clamp.default, aten.softmax.int, aten.log_softmax.int, aten.layer_norm.default,
    aten.rms_norm.default, aten.embedding.default, aten.sum.dim_IntList,
    aten.mean.dim, aten._to_copy.default, aten.to.dtype, aten.unsqueeze.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.select.int, aten.slice.Tensor, aten.expand.default, aten.cat.default,
    aten.stack.default, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
))  # fmt: skip
_SIZES_FIRST = (aten.zeros.default, aten.ones.default, aten.full.default)
_SIZES_SECOND = (aten.view.default, aten.reshape.default, aten.expand.default, aten.new_zeros.default,
                 aten.new_ones.default, aten.new_full.default)  # fmt: skip
Again = Callable[[fx.Node, list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Picked:
    """The positions at which a ``mask`` is true."""

    mask: fx.Node

    @property
    def sizes(self) -> tuple[int, ...]:
        return shape(self.mask)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.sizes)))


@dataclass(frozen=True)
class Positions:
    """All coordinates of what is picked, [u, dims]; with ``axis``: one of them, [u]."""

    picked: Picked
    axis: int | None = None


@dataclass(frozen=True)
class PickedValue:
    """A value that has one row for each picked position along ``dim``: here for all of them, of these ``axes`` of the
    mask."""

    node: fx.Node
    picked: Picked
    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Count:
    """How many are picked."""

    picked: Picked


_ALL = (Positions, PickedValue, Count)


def picks(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a captured operator picks rows by value, or reads what did."""
    if any(isinstance(x, _ALL) for x in pytree.tree_leaves((args, kwargs))):
        return True
    if node.target is aten.index.Tensor:
        return bool(free_unbacked_symbols(node.meta["val"]))
    return node.target in PICKS


@dataclass(frozen=True)
class PickedRows:
    """Makes the operators of such a node; ``again`` those of any other."""

    builder: GraphBuilder
    again: Again

    def __call__(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What takes the node's place: values, or one of the classes above.

        Raises:
            CompileError: QN101 where rows do not stay apart.
        """
        target, first = node.target, args[0]
        if target in PICKS:
            picked = self._picked(first)
            several = [Positions(picked, axis) for axis in picked.axes]
            return Positions(picked) if target is aten.nonzero.default else several
        if target is operator.getitem:
            return first[args[1]]
        if target is aten.sym_size.int:
            counts = isinstance(first, Positions) or args[1] % len(shape(first.node)) == first.dim
            return Count(first.picked) if counts else shape(first.node)[args[1]]
        if isinstance(first, Positions) and (found := self._positions(node, first, args)) is not None:
            return found
        if not isinstance(node.meta["val"], (Tensor, list, tuple)):
            raise self._refusal(node)  # arithmetic on how many there are
        if target is aten.index_select.default and isinstance(args[2], Positions) and isinstance(first, fx.Node):
            args, target = [first, [None] * (args[1] % len(shape(first))) + [args[2]]], aten.index.Tensor
        if target is aten.index.Tensor and isinstance(first, fx.Node):
            return self._read(node, first, args[1])
        if target is aten.index_add.default and isinstance(args[2], Positions) and isinstance(first, fx.Node):
            source = args[3]
            if (alpha := kwargs.get("alpha", 1)) != 1:
                source = self._apart(node, aten.mul.Scalar, [source, alpha])
            return self._write(node, first, [None] * (args[1] % len(shape(first))) + [args[2]], source, adds=True)
        if target is aten.index_put.default and isinstance(first, fx.Node):
            adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
            return self._write(node, first, args[1], args[2], adds=adds)
        return self._each(node, args, kwargs)

    def _picked(self, mask: fx.Node) -> Picked:
        return Picked(mask if value(mask).dtype is torch.bool else self.builder.call(aten.ne.Scalar, mask, 0))

    def _positions(self, node: fx.Node, given: Positions, args: list[Any]) -> Any:
        picked = given.picked
        if given.axis is not None:
            return given if node.target in _SAME and node.meta["val"].dim() == 1 else None
        if node.target is aten.select.int and args[1] in (1, -1):
            return Positions(picked, args[2] % len(picked.axes))
        if node.target is aten.unbind.int and args[1:] in ([1], [-1]):
            return [Positions(picked, axis) for axis in picked.axes]
        alone = node.target in _SAME and len(picked.axes) == 1
        return Positions(picked, 0) if alone and node.meta["val"].dim() == 1 else None

    def _indices(self, node: fx.Node, given: Sequence[Any]) -> tuple[int, list[Positions]]:
        """The first dim that is indexed, and the coordinates that index it and those behind it."""
        found: list[tuple[int, Positions]] = []
        at = 0
        for index in given:
            if isinstance(index, fx.Node) and value(index).dtype in (torch.bool, torch.uint8):
                picked = self._picked(index)
                found += [(at + axis, Positions(picked, axis)) for axis in picked.axes]
                at += len(picked.axes)
                continue
            if index is not None and (not isinstance(index, Positions) or index.axis is None):
                raise self._refusal(node)
            found += [] if index is None else [(at, index)]
            at += 1
        first, several = found[0][0], [index for _, index in found]
        together = [dim for dim, _ in found] == list(range(first, first + len(found)))
        if not together or len({one.picked for one in several}) > 1 or len({one.axis for one in several}) < len(found):
            raise self._refusal(node)
        return first, several

    def _read(self, node: fx.Node, x: fx.Node, given: Sequence[Any]) -> PickedValue:
        """x[rows], x[rows, way], x[mask]: all of x, and zeros where nothing is picked."""
        first, several = self._indices(node, given)
        picked, axes = several[0].picked, [int(one.axis or 0) for one in several]
        if [shape(x)[first + i] for i in range(len(axes))] != [picked.sizes[axis] for axis in axes]:
            raise self._refusal(node)
        order, ordered, call = sorted(range(len(axes)), key=axes.__getitem__), tuple(sorted(axes)), self.builder.call
        if order != list(range(len(axes))):
            dims = list(range(len(shape(x))))
            dims[first : first + len(axes)] = [first + i for i in order]
            x = call(aten.permute.default, x, dims)
        size = shape(x)
        many = prod(size[first : first + len(axes)])
        x = self.builder.reshape(x, [*size[:first], many, *size[first + len(axes) :]])
        return PickedValue(self._kept(x, picked, first, ordered), picked, first, ordered)

    def _kept(self, x: fx.Node, picked: Picked, dim: int, axes: tuple[int, ...]) -> fx.Node:
        """``x`` where something is picked, and zeros elsewhere."""
        chosen = self.builder.reshape(self._any(picked, axes), [n if d == dim else 1 for d, n in enumerate(shape(x))])
        return self.builder.call(aten.masked_fill.Scalar, x, self.builder.call(aten.logical_not.default, chosen), 0)

    def _any(self, picked: Picked, axes: tuple[int, ...]) -> fx.Node:
        """Whether anything is picked at these coordinates, as one dim."""
        others = [axis for axis in picked.axes if axis not in axes]
        found = self.builder.call(aten.any.dims, picked.mask, others) if others else picked.mask
        return self.builder.reshape(found, [prod(picked.sizes[axis] for axis in axes)])

    def _spread(self, rows: PickedValue, axes: tuple[int, ...]) -> fx.Node:
        """``rows`` for all positions of ``axes``."""
        if rows.axes == axes:
            return rows.node
        size, sizes = shape(rows.node), rows.picked.sizes
        before, behind = list(size[: rows.dim]), list(size[rows.dim + 1 :])
        held = self.builder.reshape(rows.node, [*before, *(sizes[a] if a in rows.axes else 1 for a in axes), *behind])
        wide = self.builder.call(aten.expand.default, held, [*before, *(sizes[a] for a in axes), *behind])
        return self.builder.reshape(wide, [*before, prod(sizes[a] for a in axes), *behind])

    def _write(self, node: fx.Node, x: fx.Node, given: Sequence[Any], source: Any, *, adds: bool) -> fx.Node:
        first, several = self._indices(node, given)
        picked, axes, call = several[0].picked, [int(one.axis or 0) for one in several], self.builder.call
        fits = isinstance(source, PickedValue) and source.picked == picked and source.dim == first
        fits = fits and len(shape(source.node)) == len(shape(x)) - len(axes) + 1
        sizes = [picked.sizes[axis] for axis in axes]
        if not fits or list(shape(x)[first : first + len(axes)]) != sizes:
            raise self._refusal(node)
        others = [axis for axis in picked.axes if axis not in axes]
        if not adds and others and not _one_at_most(picked.mask, others):
            raise self._refusal(node, "several rows of what is written may have one place: use index_add_")
        made = self._kept(self._spread(source, picked.axes), picked, first, picked.axes)
        size = shape(made)
        made = self.builder.reshape(made, [*size[:first], *picked.sizes, *size[first + 1 :]])
        if others:
            made = call(aten.sum.dim_IntList, made, [first + axis for axis in others], False)
        left = [axis for axis in picked.axes if axis in axes]
        if left != axes:
            dims = list(range(len(shape(made))))
            dims[first : first + len(axes)] = [first + left.index(axis) for axis in axes]
            made = call(aten.permute.default, made, dims)
        if adds:
            return call(aten.add.Tensor, x, made)
        chosen = call(aten.any.dims, picked.mask, others) if others else picked.mask
        if left != axes:
            chosen = call(aten.permute.default, chosen, [left.index(axis) for axis in axes])
        chosen = self.builder.reshape(chosen, [1] * first + sizes + [1] * (len(shape(x)) - first - len(axes)))
        return call(aten.where.self, chosen, made, x)

    def _apart(self, node: fx.Node, target: Any, args: list[Any]) -> Any:
        rows: PickedValue = args[0]
        return PickedValue(self.builder.call(target, rows.node, *args[1:]), rows.picked, rows.dim, rows.axes)

    def _each(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """An operator that computes each row on its own."""
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _ALL)]
        if len({x.picked for x in read}) > 1 or node.target is gradient or _counts(node, args, kwargs):
            raise self._refusal(node)
        picked = read[0].picked
        held = {x: self._as_rows(node, x) for x in read if not isinstance(x, Count)}
        axes = tuple(sorted({axis for rows in held.values() for axis in rows.axes})) or picked.axes
        dims: dict[fx.Node, int] = {}
        tame = node.target in _TAME
        beside = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        if not tame and any(map(needs_grad, beside)):
            raise self._refusal(node, "its derivative may be no number where no row is picked")

        def given(x: Any) -> Any:
            if isinstance(x, Count):
                return prod(picked.sizes[axis] for axis in axes)
            if x not in held:
                return x
            spread = self._spread(held[x], axes)
            if not tame and needs_grad(spread):
                spread = self._kept(spread, picked, held[x].dim, axes)
            dims[spread] = held[x].dim
            return spread

        args, kwargs = pytree.tree_map_only(_ALL, given, (args, kwargs))
        before = len(self.builder.made)
        result = self.again(node, list(args), dict(kwargs))
        for made in self.builder.made[before:]:
            self._follow(node, made, dims)
        known, several = node.meta["val"], isinstance(result, list)
        pairs = zip(result, known, strict=True) if several else [(result, known)]
        found = [self._result(node, one, x, dims, picked, axes) for one, x in pairs]
        if not tame:
            found = [
                replace(x, node=self._kept(x.node, picked, x.dim, axes)) if isinstance(x, PickedValue) else x
                for x in found
            ]
        return found if several else found[0]

    def _as_rows(self, node: fx.Node, x: PickedValue | Positions) -> PickedValue:
        if isinstance(x, PickedValue):
            return x
        if x.axis is None:
            raise self._refusal(node)
        device = value(x.picked.mask).device
        numbers = self.builder.call(aten.arange.default, x.picked.sizes[x.axis], device=device)
        return PickedValue(numbers, x.picked, 0, (x.axis,))

    def _follow(self, node: fx.Node, made: fx.Node, dims: dict[fx.Node, int]) -> None:
        """Note which dim of ``made`` has the rows, if its rule lets them stay apart."""
        sources = [(i, x) for i, x in enumerate(tensor_inputs(made)) if x in dims]
        if not sources:
            return
        if is_getitem(made):
            dims[made] = dims[made.args[0]]  # type: ignore[index]
            return
        rule = RULES.get(made.target)
        spec = None if rule is None or made.target in (dropout, noise) else rule.factors(made)
        names = {spec.inputs[i][dims[x]] for i, x in sources if spec is not None and len(spec.inputs[i]) > dims[x]}
        if spec is None or len(names) != 1 or not (name := names.pop()) or not spec.whole.isdisjoint(name):
            raise self._refusal(node)
        places = {out.index(name) if name in out else -1 for out in spec.outputs}
        if len(places) != 1 or -1 in places:
            raise self._refusal(node)
        dims[made] = places.pop()

    def _result(
        self,
        node: fx.Node,
        made: Any,
        known: Tensor,
        dims: Mapping[fx.Node, int],
        picked: Picked,
        axes: tuple[int, ...],
    ) -> Any:
        at = [d for d, size in enumerate(known.shape) if isinstance(size, SymInt) and free_unbacked_symbols(size)]
        if not at:
            return made
        source = origin(made)[0]
        mine = dims.get(made, dims.get(source, at[0] if not tensor_inputs(source) else -1))
        if at != [mine]:
            raise self._refusal(node)
        return PickedValue(made, picked, mine, axes)

    def _refusal(self, node: fx.Node, why: str = "") -> CompileError:
        return shape_by_value(node.target, self.builder.where, why)


def _counts(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether how many are picked is more than a size."""
    sizes = args[0] if node.target in _SIZES_FIRST else args[1] if node.target in _SIZES_SECOND else []
    every = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Count)]
    return len(every) != len([x for x in pytree.tree_leaves(sizes) if isinstance(x, Count)])


def _one_at_most(mask: fx.Node, axes: Sequence[int]) -> bool:
    """Whether a mask is true at most once along its last dim: where the indices of a topk are one number."""
    if mask.target is not aten.eq.Scalar or list(axes) != [len(shape(mask)) - 1]:
        return False
    source, output = origin(mask.args[0])  # type: ignore[arg-type]
    if source.target is not aten.topk.default or output != 1:
        return False
    dim = source.args[2] if len(source.args) > 2 else -1
    return dim in (-1, len(shape(mask)) - 1)
