"""Parameters that are only read cast, with scales: ranks cast the slices that they store, and gather the casts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...core.annotations import shape, tensor_inputs
from ...core.sharding import AxisType, Shard, forward_type, shard_shape
from ...ir.program import ShardedProgram, Strategy
from ...ops.catalog import op_spec
from ...strategies.rule_book import RuleBook, refine, strategies

aten = torch.ops.aten


def slice_cast_strategies(
    program: ShardedProgram, node: fx.Node, kinds: Sequence[AxisType], book: RuleBook
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """Return the strategies of the operators that cast parameter ``node``, on slices of types ``kinds``.

    A scale over what ranks store is the largest of theirs. Empty where another operator reads the parameter, where
    ``kinds`` have padding, or where an inner axis slices, or splits for an operator, the same dim.
    """
    casts = _casts(node)
    changed = [p for p, kind in enumerate(kinds) if kind != program.produced(node)[p]]
    if not casts or not _even(program, node, kinds, changed):
        return {}
    cast_strategies: dict[fx.Node, tuple[Strategy, ...]] = {}
    types: dict[fx.Node, Sequence[AxisType]] = {node: kinds}
    for cast in casts:
        chosen = _strategies(program, cast, [types[source] for source in tensor_inputs(cast)], changed, book)
        if chosen is None:
            return {}
        cast_strategies[cast] = chosen
        types[cast] = [strategy.outputs[0] for strategy in chosen]
    return cast_strategies


def _casts(node: fx.Node) -> list[fx.Node]:
    """Return the operators that cast a parameter, in order; none if another operator reads its values."""
    casts: set[fx.Node] = set()
    todo = [node]
    while todo:
        source = todo.pop()
        for user in source.users:
            spec = op_spec(user)
            step = spec.cast_step
            if step is not None or spec.detaches:
                if user not in casts and step != "cast":
                    todo.append(user)
                casts.add(user)
            elif spec.user_derivative != "declaration" and op_spec(source).cast_step != "scale":
                return []  # products read scales
    if all(op_spec(cast).cast_step != "cast" for cast in casts):
        return []
    return [cast for cast in node.graph.nodes if cast in casts]


def _even(program: ShardedProgram, node: fx.Node, kinds: Sequence[AxisType], changed: Sequence[int]) -> bool:
    """Return whether the axes ``changed`` slice a parameter without padding, and no inner axis slices the same dim."""
    local = tuple(shape(node))
    for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        if isinstance(kind, Shard) and position in changed:
            inner_dims = [inner.dim for inner in kinds[position + 1 :] if isinstance(inner, Shard)]
            has_padding = kind.padded(local[kind.dim], axis.size) != local[kind.dim]
            if kind.dim in inner_dims or kind != Shard(kind.dim) or has_padding:
                return False
        local = shard_shape(local, kind, axis.size)
    return True


def _strategies(
    program: ShardedProgram,
    node: fx.Node,
    input_types: Sequence[Sequence[AxisType]],
    changed: Sequence[int],
    book: RuleBook,
) -> tuple[Strategy, ...] | None:
    """Return the strategies of an operator that reads ``input_types``; on axes other than ``changed`` they stay.

    None if its rule has no such strategy, or an inner axis splits what is in slices then.
    """
    factors, strategies_by_axis = book.factors_of(node), list[Strategy]()
    for position, (axis, strategy) in enumerate(zip(program.axes, program.strategies[node], strict=True)):
        chosen = strategy
        if position in changed:
            wanted = tuple(forward_type(types[position]) for types in input_types)
            options = [option for option in strategies(node, factors, {}, axis.size) if option.inputs == wanted]
            if not options:
                return None
            chosen = options[0]
        elif chosen.splits and not all(name in factors.sizes for name, _ in chosen.units):
            return None
        strategies_by_axis.append(chosen)
        factors = refine(factors, chosen, axis.size)
    return tuple(strategies_by_axis)
