"""Where the padding of dims that do not divide by the number of ranks arises, and where it has to be filled.

A rank's part of a dim of n over k ranks has room for ceil(n / k), so that all ranks of a stage run one program. What an
operator computes from padding is never read, and may be anything (0 / 0 is NaN): as long as an operator works on each
index of a factor alone, padding stays padding. Where it combines indices, in the forward or in its backward, padding is
filled with zeros first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..core.annotations import is_float, needs_grad, tensor_inputs, value, values
from ..core.sharding import Shard, Sharding, shard_shape
from ..ir.program import Axis, Strategy
from ..ops.catalog import op_spec
from ..ops.derivatives.user_derivatives import arrives
from ..ops.rules.notation import Dims, Factors
from .rule_book import refine


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
