"""Conversions of values between shardings, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ...core.annotations import leaf, needs_grad, values
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, P, R, Shard, Sharding, conversion_path, forward_type, local_shape
from ...ir.builder import GraphBuilder
from ...ir.program import Axis, Gathered, ShardedProgram, StagedProgram
from ...ops.collectives import convert, share
from ...ops.rank_local import microbatch
from ...strategies.padding_fills import padded_dims
from .padding import Padding

aten = torch.ops.aten


@dataclass
class Conversions:
    """Converts local values for their users, and makes each conversion once.

    Attributes:
        local: the local node of each output of an operator or leaf.
        stage: the stage of each local node; conversions add theirs.
        at_start: nodes that copy or gather parameters once a step.
        deferred: gathered or copied parameters whose gradients are summed over microbatches in this form, each with the
            stored parameter; see :class:`LocalProgram`.
        shared: by value, axis, types and stage, the conversion that all users share.
        copies: by parameter and stage, the copy in another dtype.
        slices: slices that ranks take of what all of them have, each with that value.
    """

    builder: GraphBuilder
    staged: StagedProgram
    padding: Padding
    local: Mapping[tuple[fx.Node, int], fx.Node]
    stage: dict[fx.Node, int]
    at_start: set[fx.Node] = field(default_factory=set)
    deferred: dict[fx.Node, fx.Node] = field(default_factory=dict)
    shared: dict[tuple[fx.Node, int, Sharding, int | None], fx.Node] = field(default_factory=dict)
    copies: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    slices: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def _sharded(self) -> ShardedProgram:
        return self.staged.sharded

    @property
    def _axes(self) -> Sequence[Axis]:
        return self._sharded.axes

    def converted(self, source: fx.Node, index: int, target: Sharding, grad: bool, stage: int | None) -> fx.Node:
        """Return ``source`` in sharding ``target``, for a user in ``stage``."""
        start, node = self._sharded.produced(source, index), self.local[source, index]
        source_leaf, gather = leaf(source), self._sharded.gathered.get(source)
        # every stage that uses a parameter has it
        home = stage if source_leaf is not None and source_leaf.kind == "parameter" else self.staged.stage.get(source)
        if source_leaf is not None and source_leaf.held is not None:
            node = self._copied(node, values(source)[0].dtype, stage)
        # gradients of deferred gathers belong to the gathered value, so that all users read it
        deferred = gather is not None and gather.deferred and grad
        if gather is not None and (
            deferred or [forward_type(kind) for kind in target] != [forward_type(kind) for kind in start]
        ):
            whole = values(source)[index].shape
            node, start = self._gathered(node, start, gather, stage, whole), gather.sharding
        if not grad:  # without gradients I and R are the same bits
            start, target = tuple(map(forward_type, start)), tuple(map(forward_type, target))
        return self._moved(node, start, target, R if grad else I, (home, stage), values(source)[index].shape)

    def made_at_start(self, node: fx.Node) -> bool:
        """Return whether a value is a parameter, or is made once a step; slices of one are then cut once, too."""
        slices = list[fx.Node]()
        while node in self.slices:
            slices.append(node)
            node = self.slices[node]
        source = leaf(node)
        at_start = node in self.at_start or (source is not None and source.kind == "parameter")
        self.at_start.update(slices if at_start else ())
        return at_start

    def _copied(self, stored: fx.Node, dtype: torch.dtype, stage: int | None) -> fx.Node:
        """Return the copy that ``stage`` reads of a parameter that is stored in another dtype."""
        if (stored, stage) not in self.copies:
            copy = self.copies[stored, stage] = self.builder.call(aten._to_copy.default, stored, dtype=dtype)
            if stage is not None:
                self.stage[copy] = stage
                self.at_start.add(copy)
            if needs_grad(stored):
                self.deferred[copy] = stored
        return self.copies[stored, stage]

    def _gathered(
        self, stored: fx.Node, start: Sharding, gather: Gathered, stage: int | None, whole: Sequence[int]
    ) -> fx.Node:
        """Return the gathered value that operators of ``stage`` read of a parameter that is stored in slices."""
        first_new = len(self.builder.made)
        replicated = R if needs_grad(stored) else I
        node = self._moved(stored, start, gather.sharding, replicated, (stage, stage), whole)
        if gather.once or gather.deferred:
            self.at_start.update(self.builder.made[first_new:])
        if gather.deferred:
            self.deferred[node] = self.deferred.get(stored, stored)
        return node

    def _moved(
        self,
        node: fx.Node,
        start: Sharding,
        target: Sharding,
        replicated: AxisType,
        stages: tuple[int | None, int | None],
        whole: Sequence[int],
    ) -> fx.Node:
        """Convert ``node`` from ``start`` to ``target``, one axis at a time.

        ``replicated``: the type of intermediate replicated values. ``stages``: of the value, and of its user.
        ``whole``: the global shape.
        """
        state, (home, stage) = list(start), stages
        for position, new_type in self._path(start, target, replicated, whole):
            old_type = state[position]
            state[position] = new_type
            gathers = isinstance(old_type, Shard) and not isinstance(new_type, Shard)
            if home is not None and gathers:
                home = stage
            # users with a gradient and without one read different types: I and R have different transposes
            key = (node, position, (old_type, new_type), home)
            if key not in self.shared:
                first_new = len(self.builder.made)
                padded = padded_dims(whole, (*state[:position], old_type, *state[position + 1 :]), self._axes)
                size = self._local(whole, tuple(state))
                self.shared[key] = self._convert(node, position, old_type, new_type, size, padded)
                new_nodes = self.builder.made[first_new:]
                if home is not None:
                    self.stage |= dict.fromkeys(new_nodes, home)
                if old_type in (R, I) and self._axes[position].role != "time" and new_nodes == [self.shared[key]]:
                    self.slices[self.shared[key]] = node
            node = self.shared[key]
        return node

    def _path(
        self, start: Sharding, target: Sharding, replicated: AxisType, whole: Sequence[int]
    ) -> list[tuple[int, AxisType]]:
        """Return the steps of :func:`conversion_path`.

        Ranks that slice one dim in two ways exchange slices only where neither way has padding; otherwise they gather.
        """
        state, steps = list(start), list[tuple[int, AxisType]]()
        for position, new_type in conversion_path(start, target, replicated):
            old_type = state[position]
            if isinstance(old_type, Shard) and isinstance(new_type, Shard) and old_type.dim == new_type.dim:
                size = self._local(whole, tuple(state[:position]), position)[new_type.dim]
                if any(slices.padded(size, self._axes[position].size) != size for slices in (old_type, new_type)):
                    steps.append((position, replicated))
            steps.append((position, new_type))
            state[position] = new_type
        return steps

    def _convert(
        self,
        node: fx.Node,
        position: int,
        old_type: AxisType,
        new_type: AxisType,
        size: Sequence[int],
        padded: frozenset[int],
    ) -> fx.Node:
        """Convert ``node`` on one axis: pad before it is split, trim after it is gathered.

        ``size``: the local shape of the result; ``padded``: the dims of ``node`` that have padding.
        """
        axis = self._axes[position]
        if isinstance(old_type, Shard) and isinstance(new_type, Shard) and old_type.dim == new_type.dim:  # no padding
            return self._exchanged(node, position, old_type, new_type)
        if isinstance(new_type, Shard):
            length = size[new_type.dim] * axis.size
            node = self.padding.extended(node, new_type.dim, new_type.parts, length, padded=new_type.dim in padded)
        converted = self._exchanged(node, position, old_type, new_type)
        self.padding.copy_zeros(node, converted)
        if isinstance(old_type, Shard):
            converted = self.padding.trimmed(converted, old_type.dim, old_type.parts, size[old_type.dim])
        return converted

    def _exchanged(self, node: fx.Node, position: int, old_type: AxisType, new_type: AxisType) -> fx.Node:
        """Emit the conversion itself.

        Raises:
            CompileError: if microbatches would have to exchange values.
        """
        axis = self._axes[position]
        if axis.role == "time" and isinstance(new_type, Shard):
            unit = [new_type.unit] if new_type.unit > 1 else []
            return self.builder.call(microbatch, node, axis.size, new_type.dim, new_type.parts, *unit)
        local = forward_type(old_type) is I and (new_type is P or (old_type is R and new_type is I))
        if axis.role == "time" and not local:
            raise CompileError(
                "QN104",
                f"a value split over {axis.size} microbatches would have to be exchanged between them",
                where=self.builder.where,
                fix="use microbatches=1",
            )
        if forward_type(old_type) is I and new_type is P and not needs_grad(node):
            return self.builder.call(share, node, axis.name, axis.size)
        return self.builder.call(convert, node, axis.name, axis.size, str(old_type), str(new_type))

    def _local(self, size: Sequence[int], sharding: Sharding, axes: int | None = None) -> tuple[int, ...]:
        return local_shape(size, sharding, self._sharded.axis_sizes[:axes])
