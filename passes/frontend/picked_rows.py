"""Rows that a forward picks by value (``where(mask)``, ``nonzero``, ``x[mask]``), as all rows and a mask.

A mixture of experts in plain PyTorch picks the rows of each expert, computes on those, and adds or writes the result
back. Their number depends on values; the result of a row does not depend on which other rows there are. So::

    rows, way = torch.where(ids == e)               # [u], [u] of [N, K]
    h = expert(x[rows]) * w[rows, way, None]        # [u, D]
    out.index_add_(0, rows, h)

is computed for all positions of the mask, and positions that are not picked add nothing. A value that depends on some
coordinates of the positions alone is computed for these: the experts for N rows, and not for N * K. The sharding rule
of each operator in between says that it computes every row by itself: it may be split over that dim.

Rows that are not picked are zeros, whatever they hold (``x[x.isfinite()]``), and get no gradient. An operator whose
result for a zero may be infinite or NaN (a logarithm) is between two masks, which hide its result and its derivative.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from ...capture.sizes_by_value import shape_by_value
from ...compat.torch import free_unbacked_symbols, pytree
from ...core.annotations import is_getitem, needs_grad, origin, shape, tensor_inputs, value
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder
from ...ops.catalog import op_spec
from ...ops.rules.notation import Factors
from ...ops.rules.table import RULES
from .picked_values import (
    PICKED_CLASSES,
    Count,
    Indices,
    Picked,
    PickedValue,
    Positions,
    counts_rows,
    has_rows_of,
    size_of,
    true_at_most_once,
)

aten = torch.ops.aten
_SAME = (
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.view.default, aten.reshape.default, aten.flatten.using_ints,
)  # fmt: skip
# for finite inputs their results and derivatives are finite
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
Again = Callable[[fx.Node, list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class PickedRows:
    """Emits the operators of such a node. ``again`` emits any other operator."""

    builder: GraphBuilder
    again: Again

    def __call__(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return what replaces the node: values, or one of the classes above.

        Raises:
            CompileError: QN101 if rows are not independent.
        """
        if op_spec(node).finds:
            return self._positions_of_mask(node, args[0])
        if is_getitem(node):
            return args[0][args[1]]
        if node.target is aten.sym_size.int:
            return size_of(args[0], args[1])
        if isinstance(args[0], Positions):
            positions = self._positions(node, args[0], args)
            if positions is not None:
                return positions
        if not isinstance(node.meta["val"], (Tensor, list, tuple)):
            raise self._refusal(node)  # arithmetic on the number of picked rows
        if isinstance(args[0], fx.Node) and _reads_or_writes(node, args):
            return self._read_or_write(node, args, kwargs)
        return self._each(node, args, kwargs)

    def _read_or_write(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Emit an operator that reads or writes a value at picked positions."""
        emit = _WITH_INDICES.get(node.target) or _WITH_INDICES_OF_A_DIM[node.target]
        return emit(self, node, args, kwargs)

    def _index(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._read(node, args[0], args[1])

    def _index_put(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        adds = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
        return self._write(node, args[0], args[1], args[2], adds=adds)

    def _index_select(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._read(node, args[0], _indices_of_a_dim(args))

    def _index_add(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        source, alpha = args[3], kwargs.get("alpha", 1)
        if alpha != 1:
            source = self._scaled(source, alpha)
        return self._write(node, args[0], _indices_of_a_dim(args), source, adds=True)

    # -- positions

    def _picked(self, mask: fx.Node) -> Picked:
        return Picked(mask if value(mask).dtype is torch.bool else self.builder.call(aten.ne.Scalar, mask, 0))

    def _positions_of_mask(self, node: fx.Node, mask: fx.Node) -> Positions | list[Positions]:
        picked = self._picked(mask)
        if node.target is aten.nonzero.default:
            return Positions(picked)
        return [Positions(picked, axis) for axis in picked.axes]

    def _positions(self, node: fx.Node, positions: Positions, args: list[Any]) -> Any:
        """Return the coordinates that a view of ``positions`` has, or None if the node is no such view."""
        picked = positions.picked
        flat_view = node.target in _SAME and node.meta["val"].dim() == 1
        if positions.axis is not None:
            return positions if flat_view else None
        if node.target is aten.select.int and args[1] in (1, -1):
            return Positions(picked, args[2] % len(picked.axes))
        if op_spec(node).splits == "each" and args[1:] in ([1], [-1]):
            return [Positions(picked, axis) for axis in picked.axes]
        return Positions(picked, 0) if flat_view and len(picked.axes) == 1 else None

    def _indices(self, node: fx.Node, indices: Sequence[Any]) -> Indices:
        """Return the positions that index a value.

        Raises:
            CompileError: if they index dims that are not adjacent, or come from several masks.
        """
        by_dim: list[tuple[int, Positions]] = []
        dim = 0
        for index in indices:
            positions = self._positions_of_index(node, index)
            by_dim += [(dim + i, coordinate) for i, coordinate in enumerate(positions)]
            dim += len(positions) if isinstance(index, fx.Node) else 1
        first = by_dim[0][0]
        axes = [int(positions.axis or 0) for _, positions in by_dim]
        adjacent = [dim for dim, _ in by_dim] == list(range(first, first + len(by_dim)))
        of_one_mask = len({positions.picked for _, positions in by_dim}) == 1
        if not adjacent or not of_one_mask or len(set(axes)) < len(axes):
            raise self._refusal(node)
        return Indices(first, by_dim[0][1].picked, axes)

    def _positions_of_index(self, node: fx.Node, index: Any) -> list[Positions]:
        """Return the coordinates that an index stands for: none for a whole dim, several for a mask."""
        if index is None:
            return []
        if isinstance(index, fx.Node) and value(index).dtype in (torch.bool, torch.uint8):
            picked = self._picked(index)
            return [Positions(picked, axis) for axis in picked.axes]
        if not isinstance(index, Positions) or index.axis is None:
            raise self._refusal(node)
        return [index]

    # -- reading and writing at positions

    def _read(self, node: fx.Node, x: fx.Node, given_indices: Sequence[Any]) -> PickedValue:
        """Emit x[rows], x[rows, way] or x[mask]: all of x, with zeros where nothing is picked."""
        indices = self._indices(node, given_indices)
        if not indices.match_sizes_of(x):
            raise self._refusal(node)
        axes, first = indices.axes, indices.dim
        order, ordered = sorted(range(len(axes)), key=axes.__getitem__), tuple(sorted(axes))
        x = self._permuted(x, first, order)
        size = shape(x)
        rows = prod(size[first : indices.next_dim])
        x = self.builder.reshape(x, [*size[:first], rows, *size[indices.next_dim :]])
        return PickedValue(self._masked(x, indices.picked, first, ordered), indices.picked, first, ordered)

    def _write(self, node: fx.Node, x: fx.Node, given_indices: Sequence[Any], source: Any, *, adds: bool) -> fx.Node:
        """Emit ``x`` with ``source`` added or written at picked positions."""
        indices = self._indices(node, given_indices)
        picked, axes, first = indices.picked, indices.axes, indices.dim
        if not has_rows_of(source, x, indices) or not indices.match_sizes_of(x):
            raise self._refusal(node)
        others = picked.axes_except(axes)
        if not adds and others and not true_at_most_once(picked.mask, others):
            raise self._refusal(node, "several rows of what is written may have one place: use index_add_")
        rows = self._masked(self._spread(source, picked.axes), picked, first, picked.axes)
        size = shape(rows)
        rows = self.builder.reshape(rows, [*size[:first], *picked.sizes, *size[first + 1 :]])
        if others:
            rows = self.builder.call(aten.sum.dim_IntList, rows, [first + axis for axis in others], False)
        remaining = picked.axes_except(others)
        order = [remaining.index(axis) for axis in axes]
        rows = self._permuted(rows, first, order)
        if adds:
            return self.builder.call(aten.add.Tensor, x, rows)
        mask = self.builder.call(aten.any.dims, picked.mask, others) if others else picked.mask
        mask = self._permuted(mask, 0, order)
        mask = self.builder.reshape(mask, [1] * first + indices.sizes + [1] * (len(shape(x)) - indices.next_dim))
        return self.builder.call(aten.where.self, mask, rows, x)

    def _permuted(self, x: fx.Node, first: int, order: Sequence[int]) -> fx.Node:
        """Return ``x`` with the dims from ``first`` on in another order."""
        if list(order) == list(range(len(order))):
            return x
        dims = list(range(len(shape(x))))
        dims[first : first + len(order)] = [first + i for i in order]
        return self.builder.call(aten.permute.default, x, dims)

    def _masked(self, x: fx.Node, picked: Picked, dim: int, axes: tuple[int, ...]) -> fx.Node:
        """Return ``x`` with zeros where nothing is picked."""
        mask = self.builder.reshape(self._any(picked, axes), [n if d == dim else 1 for d, n in enumerate(shape(x))])
        return self.builder.call(aten.masked_fill.Scalar, x, self.builder.call(aten.logical_not.default, mask), 0)

    def _any(self, picked: Picked, axes: tuple[int, ...]) -> fx.Node:
        """Return whether anything is picked at these coordinates, as one dim."""
        others = picked.axes_except(axes)
        mask = self.builder.call(aten.any.dims, picked.mask, others) if others else picked.mask
        return self.builder.reshape(mask, [prod(picked.sizes[axis] for axis in axes)])

    def _spread(self, rows: PickedValue, axes: tuple[int, ...]) -> fx.Node:
        """Return ``rows`` for all positions of ``axes``."""
        if rows.axes == axes:
            return rows.node
        size, sizes = shape(rows.node), rows.picked.sizes
        leading, trailing = list(size[: rows.dim]), list(size[rows.dim + 1 :])
        narrow_sizes = [sizes[a] if a in rows.axes else 1 for a in axes]
        narrow = self.builder.reshape(rows.node, [*leading, *narrow_sizes, *trailing])
        wide = self.builder.call(aten.expand.default, narrow, [*leading, *(sizes[a] for a in axes), *trailing])
        return self.builder.reshape(wide, [*leading, prod(sizes[a] for a in axes), *trailing])

    def _scaled(self, rows: PickedValue, factor: Any) -> PickedValue:
        return replace(rows, node=self.builder.call(aten.mul.Scalar, rows.node, factor))

    # -- operators on picked rows

    def _each(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Emit an operator that computes each row by itself."""
        inputs = self._picked_inputs(node, args, kwargs)
        picked = inputs[0].picked
        rows = {x: self._as_rows(node, x) for x in inputs if not isinstance(x, Count)}
        axes = tuple(sorted({axis for x in rows.values() for axis in x.axes})) or picked.axes
        masked = node.target not in _TAME
        if masked:
            self._refuse_other_gradients(node, args, kwargs)
        spread = {x: self._spread_input(x_rows, axes, masked=masked) for x, x_rows in rows.items()}
        dims = {spread[x]: rows[x].dim for x in rows}

        def concrete(x: Any) -> Any:
            return prod(picked.sizes[axis] for axis in axes) if isinstance(x, Count) else spread[x]

        args, kwargs = pytree.tree_map_only(PICKED_CLASSES, concrete, (args, kwargs))
        first_new = len(self.builder.made)
        result = self.again(node, list(args), dict(kwargs))
        for new in self.builder.made[first_new:]:
            self._follow(node, new, dims)
        if isinstance(result, list):
            results = zip(result, node.meta["val"], strict=True)
            return [self._result(node, x, like, dims, picked, axes, masked=masked) for x, like in results]
        return self._result(node, result, node.meta["val"], dims, picked, axes, masked=masked)

    def _picked_inputs(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the inputs of an operator that stand for picked rows.

        Raises:
            CompileError: if they come from several masks, or their number is used as a number.
        """
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, PICKED_CLASSES)]
        differentiates = op_spec(node).inner_gradient == "gradient"
        if len({x.picked for x in inputs}) > 1 or differentiates or counts_rows(node, args, kwargs):
            raise self._refusal(node)
        return inputs

    def _refuse_other_gradients(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Raise CompileError if inputs that are not picked need a gradient."""
        others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        if any(map(needs_grad, others)):
            raise self._refusal(node, "its derivative may be no number where no row is picked")

    def _spread_input(self, rows: PickedValue, axes: tuple[int, ...], *, masked: bool) -> fx.Node:
        """Return an input for all positions of ``axes``; ``masked``: with zeros where no row is picked."""
        spread = self._spread(rows, axes)
        if masked and needs_grad(spread):
            spread = self._masked(spread, rows.picked, rows.dim, axes)
        return spread

    def _as_rows(self, node: fx.Node, x: PickedValue | Positions) -> PickedValue:
        if isinstance(x, PickedValue):
            return x
        if x.axis is None:
            raise self._refusal(node)
        device = value(x.picked.mask).device
        numbers = self.builder.call(aten.arange.default, x.picked.sizes[x.axis], device=device)
        return PickedValue(numbers, x.picked, 0, (x.axis,))

    def _follow(self, node: fx.Node, new: fx.Node, dims: dict[fx.Node, int]) -> None:
        """Record the dim of ``new`` that has the rows.

        Raises:
            CompileError: if its rule does not keep rows independent.
        """
        sources = [(i, x) for i, x in enumerate(tensor_inputs(new)) if x in dims]
        if not sources:
            return
        if is_getitem(new):
            dims[new] = dims[new.args[0]]  # type: ignore[index]
            return
        rule = RULES.get(new.target)
        if rule is None or op_spec(new).random:
            raise self._refusal(node)
        dim = _dim_of_rows(rule.factors(new), [(i, dims[x]) for i, x in sources])
        if dim is None:
            raise self._refusal(node)
        dims[new] = dim

    def _result(
        self,
        node: fx.Node,
        result: Any,
        like: Tensor,
        dims: Mapping[fx.Node, int],
        picked: Picked,
        axes: tuple[int, ...],
        *,
        masked: bool,
    ) -> Any:
        """Return a result as a picked value, if the captured value ``like`` has a size by value."""
        sized = [d for d, size in enumerate(like.shape) if isinstance(size, SymInt) and free_unbacked_symbols(size)]
        if not sized:
            return result
        source = origin(result)[0]
        dim = dims.get(result, dims.get(source, sized[0] if not tensor_inputs(source) else -1))
        if sized != [dim]:
            raise self._refusal(node)
        if masked:
            result = self._masked(result, picked, dim, axes)
        return PickedValue(result, picked, dim, axes)

    def _refusal(self, node: fx.Node, why: str = "") -> CompileError:
        return shape_by_value(node.target, self.builder.where, why)


def _reads_or_writes(node: fx.Node, args: Sequence[Any]) -> bool:
    """Return whether an operator on a whole value reads or writes it at picked positions."""
    if node.target in _WITH_INDICES_OF_A_DIM:
        return isinstance(args[2], Positions)
    return node.target in _WITH_INDICES


def _indices_of_a_dim(args: Sequence[Any]) -> list[Any]:
    """Return the indices of each dim of an operator's arguments (x, dim, indices)."""
    return [None] * (args[1] % len(shape(args[0]))) + [args[2]]


_Emit = Callable[[PickedRows, fx.Node, list[Any], dict[str, Any]], Any]
_WITH_INDICES: Mapping[Any, _Emit] = {
    aten.index.Tensor: PickedRows._index,
    aten.index_put.default: PickedRows._index_put,
}
_WITH_INDICES_OF_A_DIM: Mapping[Any, _Emit] = {
    aten.index_select.default: PickedRows._index_select,
    aten.index_add.default: PickedRows._index_add,
}


def _dim_of_rows(factors: Factors, inputs: Sequence[tuple[int, int]]) -> int | None:
    """Return the dim of an operator's outputs that has rows, or None if rows are not independent.

    ``inputs``: the inputs with rows, each with its dim of rows.
    """
    groups = {factors.inputs[i][dim] for i, dim in inputs if len(factors.inputs[i]) > dim}
    if len(groups) != 1:
        return None
    (names,) = groups
    if not names or not factors.whole.isdisjoint(names):
        return None
    dims = {out.index(names) if names in out else -1 for out in factors.outputs}
    return dims.pop() if len(dims) == 1 and -1 not in dims else None
