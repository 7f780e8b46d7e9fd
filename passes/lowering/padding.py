"""Padding of dims that do not divide by the number of ranks: where it arises, and where it is filled.

A rank's part of a dim of n over k ranks has room for ceil(n / k), so that all ranks of a stage run one program. What an
operator computes from padding is never read, and may be anything (0 / 0 is NaN): as long as an operator works on each
index of a factor alone, padding stays padding. Where it combines indices, in the forward or in its backward, padding is
filled with zeros first.
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
from ...ops.catalog import op_spec
from ...ops.derivatives.user_derivatives import arrives
from ...ops.rank_local import padding_of
from ...ops.rules.notation import Dims, Factors
from ..strategies.rule_book import refine

aten = torch.ops.aten
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


def padded_dims(sizes: Sequence[int], sharding: Sharding, axes: Sequence[Axis]) -> frozenset[int]:
    """Return the dims in which a rank's part of a tensor of global shape ``sizes`` has padding.

    >>> padded_dims((7, 4), (Shard(0),), (Axis("dp", 2, "data"),))
    frozenset({0})
    """
    padded, local_sizes = set[int](), tuple(sizes)
    for kind, axis in zip(sharding, axes, strict=True):
        if isinstance(kind, Shard) and kind.padded(local_sizes[kind.dim], axis.size) != local_sizes[kind.dim]:
            padded.add(kind.dim)
        local_sizes = shard_shape(local_sizes, kind, axis.size)
    return frozenset(padded)


@dataclass(frozen=True)
class PaddingFills:
    """The dims whose padding an operator on ranks would mix with data, so that it has to be filled.

    Attributes:
        inputs: for each input, the dims to fill with zeros before it is read.
        ones: for each input, the dims to fill with ones, since the operator might divide by it.
        outputs: for each output, the dims of its gradient to fill with zeros.
        parameters: for each input, the dims in whose padding a nonzero gradient would arise. Parameters must have none.
        everywhere: whether all inputs and outputs have every factor with padding, so that padding of a result is
            computed from padding alone.
    """

    inputs: tuple[frozenset[int], ...]
    ones: tuple[frozenset[int], ...]
    outputs: tuple[frozenset[int], ...]
    parameters: tuple[frozenset[int], ...]
    everywhere: bool

    @property
    def any(self) -> bool:
        """Return whether the operator mixes padding with data."""
        return any(self.inputs) or any(self.ones) or any(self.outputs)


def padding_fills(
    node: fx.Node, factors: Factors, strategies: Sequence[Strategy], axes: Sequence[Axis]
) -> PaddingFills:
    """Return the dims of factors with padding that some input or output of ``node`` lacks.

    The operator, or its backward, sums over them. An input of indices has to be filled even where nothing is summed.
    """
    collector = _FillCollector(node, factors)
    for strategy, axis in zip(strategies, axes, strict=True):
        for name in (name for name, unit in strategy.units if unit):
            collector.add_factor(factors, name)
        factors = refine(factors, strategy, axis.size)
    return collector.fills()


@dataclass(frozen=True)
class _FactorDims:
    """A factor's dim in each input that arrives and in each output. None: the tensor lacks the factor."""

    inputs: Sequence[int | None]
    outputs: Sequence[int | None]

    @property
    def in_all_tensors(self) -> bool:
        return None not in (*self.inputs, *self.outputs)

    @property
    def in_all_outputs(self) -> bool:
        return None not in self.outputs


class _FillCollector:
    """Collects the dims to fill of one operator."""

    def __init__(self, node: fx.Node, factors: Factors) -> None:
        self.node = node
        self.broadcasts = factors.product is None and not factors.whole and not factors.additive
        self.everywhere = True
        self.inputs: list[set[int]] = [set() for _ in factors.inputs]
        self.ones: list[set[int]] = [set() for _ in factors.inputs]
        self.parameters: list[set[int]] = [set() for _ in factors.inputs]
        self.outputs: list[set[int]] = [set() for _ in factors.outputs]

    def add_factor(self, factors: Factors, name: str) -> None:
        """Add what a factor with padding requires."""
        node = self.node
        factor = _FactorDims(
            [_dim(dims, name) for dims in factors.inputs[: len(arrives(node))]],
            [_dim(dims, name) for dims in factors.outputs],
        )
        self.everywhere = self.everywhere and factor.in_all_tensors
        if op_spec(node).user_derivative == "declaration":  # the gradient of a parameter's padding is zeros anyway
            self.inputs[1].update(dim for dim in factor.inputs[1:] if dim is not None)
        elif name not in factors.settled or op_spec(node).cast_step == "largest":  # others mask settled factors
            self._add_inputs(factors, factor)
            self._add_outputs(factor)

    def _add_inputs(self, factors: Factors, factor: _FactorDims) -> None:
        for position, dim in enumerate(factor.inputs):
            if dim is None:
                continue
            if self._might_divide(factors, factor, position):
                self.ones[position].add(dim)
            elif not factor.in_all_tensors or self._might_index(factors, position):
                self.inputs[position].add(dim)
            if self._has_gradient(factor):
                self.parameters[position].add(dim)

    def _add_outputs(self, factor: _FactorDims) -> None:
        if factor.in_all_tensors:
            return
        for position, dim in enumerate(factor.outputs):
            if dim is not None and needs_grad(self.node) and is_float(values(self.node)[position]):
                self.outputs[position].add(dim)

    def _might_divide(self, factors: Factors, factor: _FactorDims, position: int) -> bool:
        """Return whether an elementwise operator broadcasts another input over the factor, and may divide by this."""
        broadcast = self.broadcasts and not factor.in_all_tensors and factor.in_all_outputs
        return broadcast and not _linear_in(factors, position)

    def _might_index(self, factors: Factors, position: int) -> bool:
        """Return whether an input is of integers that the operator may use as indices."""
        return _is_integer(self.node, position) and (bool(factors.whole) or any(map(is_float, values(self.node))))

    def _has_gradient(self, factor: _FactorDims) -> bool:
        """Return whether the backward computes a gradient for padding that may not be zero."""
        inputs_with_factor = sum(dim is not None for dim in factor.inputs)
        named = op_spec(self.node).reads_named_rows  # no id names padding
        broadcast_back = not factor.in_all_outputs and inputs_with_factor < 2 and not named
        return factor.in_all_tensors or broadcast_back

    def fills(self) -> PaddingFills:
        """Return what was collected."""
        inputs, ones, outputs, parameters = (
            tuple(map(frozenset, dims)) for dims in (self.inputs, self.ones, self.outputs, self.parameters)
        )
        return PaddingFills(inputs, ones, outputs, parameters, self.everywhere)


def _linear_in(factors: Factors, position: int) -> bool:
    return any(position in group for group in factors.linear)


def _is_integer(node: fx.Node, position: int) -> bool:
    dtype = value(tensor_inputs(node)[position]).dtype
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def _dim(dims: Dims, name: str) -> int | None:
    return next((d for d, names in enumerate(dims) if name in names), None)


@dataclass
class Padding:
    """Adds and removes padding in a rank's program, and fills it.

    Attributes:
        zeros: for each node, the dims whose padding is certainly zeros.
        fills: the filled values, which users in the same ``stage`` share.
        masks: for each layout of a dim, the mask of its padding.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    stage: int | None = None
    zeros: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    fills: dict[tuple[fx.Node, frozenset[int], float, int | None], fx.Node] = field(default_factory=dict)
    masks: dict[Hashable, fx.Node] = field(default_factory=dict)

    def filled(
        self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dims: frozenset[int], fill: float = 0.0
    ) -> fx.Node:
        """Return ``x``, the local part of a value of shape ``sizes``, with ``fill`` in the padding of ``dims``.

        Gradients of padding are zeros, too.
        """
        if not dims:
            return x
        key = (x, dims, fill, self.stage)
        if key in self.fills:
            return self.fills[key]
        filled = x
        for dim in sorted(dims):
            mask = self._mask(x, sizes, sharding, dim)
            if value(x).is_floating_point() and value(x).itemsize == 1:  # masked_fill does not support these
                filled = self.builder.call(aten.where.ScalarSelf, mask, fill, filled)
            else:
                filled = self.builder.call(aten.masked_fill.Scalar, filled, mask, fill)
        self.fills[key] = filled
        if not fill:
            self.zeros[filled] = self.zeros.get(x, frozenset()) | dims
        return filled

    def _mask(self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dim: int) -> fx.Node:
        """Return a mask of the padding of ``dim`` that broadcasts with ``x``."""
        splits = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, kind in zip(self.axes, sharding, strict=True)
            if isinstance(kind, Shard) and kind.dim == dim
        ]
        count, columns = shape(x)[dim], [list(column) for column in zip(*splits, strict=True)]
        key = (count, sizes[dim], *splits)
        if key not in self.masks:
            self.masks[key] = self.builder.call(padding_of, count, sizes[dim], *columns, value(x).device)
        return self.builder.reshape(self.masks[key], [count, *[1] * (len(shape(x)) - dim - 1)])

    def extended(self, x: fx.Node, dim: int, parts: int, size: int, *, padded: bool) -> fx.Node:
        """Return ``x`` with zeros at the end of each of its ``parts``, so that ``dim`` has ``size`` indices.

        ``padded``: whether the dim has padding of another axis already, whose values stay as they are.
        """
        old_size = shape(x)[dim]
        if old_size == size:
            return x
        trailing_dims = len(shape(x)) - 1 - dim
        view = self._split_parts(x, dim, parts)
        widths = [0] * (2 * trailing_dims) + [0, (size - old_size) // parts]
        extended = self.builder.call(aten.constant_pad_nd.default, view, widths)
        extended = self._join_parts(extended, shape(x), dim, size)
        self.zeros[extended] = self.zeros.get(x, frozenset()) | (frozenset() if padded else {dim})
        return extended

    def trimmed(self, x: fx.Node, dim: int, parts: int, size: int) -> fx.Node:
        """Return ``x`` without the end of each of its ``parts``, so that ``dim`` has ``size`` indices."""
        if shape(x)[dim] == size:
            return x
        view = self._split_parts(x, dim, parts)
        trimmed_dim = dim if parts == 1 else dim + 1
        trimmed = self.builder.call(aten.slice.Tensor, view, trimmed_dim, 0, size // parts)
        trimmed = self._join_parts(trimmed, shape(x), dim, size)
        self.zeros[trimmed] = self.zeros.get(x, frozenset()) - {dim}
        return trimmed

    def _split_parts(self, x: fx.Node, dim: int, parts: int) -> fx.Node:
        size = shape(x)
        return x if parts == 1 else self.builder.reshape(x, [*size[:dim], parts, size[dim] // parts, *size[dim + 1 :]])

    def _join_parts(self, x: fx.Node, old_size: Sequence[int], dim: int, size: int) -> fx.Node:
        return self.builder.reshape(x, [*old_size[:dim], size, *old_size[dim + 1 :]])

    def copy_zeros(self, x: fx.Node, converted: fx.Node) -> None:
        """Record that a conversion of ``x`` has zeros in the same padding."""
        self.zeros.setdefault(converted, self.zeros.get(x, frozenset()))

    def keeps_zeros(self, node: fx.Node, factors: Factors, inputs: Iterable[tuple[fx.Node, frozenset[int]]]) -> bool:
        """Return whether an elementwise operator maps zeros to zeros, and its inputs have zeros in all padding.

        ``inputs``: the local inputs, each with the dims that have padding.
        """
        linear = factors.linear == ((0,),) and len(factors.inputs) == 1
        linear = linear and op_spec(node).user_derivative != "tangent"  # returns a gradient, too
        if op_spec(node).cast_step == "cast":  # the scale does not matter
            linear, inputs = True, list(inputs)[:1]
        adds_tensors = node.target in _SUMS and len(factors.inputs) == 2
        return (linear or adds_tensors or op_spec(node).keeps_zero) and all(
            self.zeros.get(x, frozenset()) >= dims for x, dims in inputs
        )
