"""Parameters of which products read 8-bit numbers alone: ranks cast what they store, and gather 8-bit numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...core.annotations import shape, tensor_inputs
from ...core.sharding import AxisType, Shard, plain, shard_shape
from ...ir.program import ShardedProgram, Strategy
from ...ops.derivatives.user_derivatives import declare_gradient
from ...ops.scaled_products import block_max, block_scale, scaled_cast
from ..strategies.rule_book import RuleBook, refine, strategies

aten = torch.ops.aten
_OF_SLICES = frozenset({aten.detach.default, block_max, block_scale, scaled_cast})


def on_slices(
    program: ShardedProgram, node: fx.Node, kinds: Sequence[AxisType], book: RuleBook
) -> dict[fx.Node, tuple[Strategy, ...]]:
    """The strategies of the operators that cast parameter ``node``, on slices of types ``kinds``: a scale over what
    ranks store is the largest of theirs. Empty where another operator reads it, or ``kinds`` have padding, or an axis
    further in slices, or splits for an operator, the same dim."""
    casts = _casts(node)
    changed = [p for p, kind in enumerate(kinds) if kind != program.produced(node)[p]]
    if not casts or not _even(program, node, kinds, changed):
        return {}
    found: dict[fx.Node, tuple[Strategy, ...]] = {}
    types: dict[fx.Node, Sequence[AxisType]] = {node: kinds}
    for cast in casts:
        chosen = _strategies(program, cast, [types[source] for source in tensor_inputs(cast)], changed, book)
        if chosen is None:
            return {}
        found[cast] = chosen
        types[cast] = [one.outputs[0] for one in chosen]
    return found


def _casts(node: fx.Node) -> list[fx.Node]:
    """The operators that cast a parameter, in order; none if another one reads its values."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        here = todo.pop()
        for user in here.users:
            scale = here.target is block_scale  # products read it, too
            if user.target in _OF_SLICES:
                todo += [user] if user not in found and user.target is not scaled_cast else []
                found.add(user)
            elif user.target is not declare_gradient and not scale:
                return []
    return [n for n in node.graph.nodes if n in found] if any(n.target is scaled_cast for n in found) else []


def _even(program: ShardedProgram, node: fx.Node, kinds: Sequence[AxisType], changed: Sequence[int]) -> bool:
    left = tuple(shape(node))
    for position, (axis, kind) in enumerate(zip(program.axes, kinds, strict=True)):
        if isinstance(kind, Shard) and position in changed:
            further = [one for one in kinds[position + 1 :] if isinstance(one, Shard) and one.dim == kind.dim]
            if further or kind != Shard(kind.dim) or kind.padded(left[kind.dim], axis.size) != left[kind.dim]:
                return False
        left = shard_shape(left, kind, axis.size)
    return True


def _strategies(
    program: ShardedProgram, node: fx.Node, given: Sequence[Sequence[AxisType]], changed: Sequence[int], book: RuleBook
) -> tuple[Strategy, ...] | None:
    """As before but over the axes ``changed``, where it takes what is ``given``; None if its rule has no such way, or
    an axis behind splits what is in slices then."""
    factors, found = book.factors_of(node), list[Strategy]()
    for position, (axis, before) in enumerate(zip(program.axes, program.strategies[node], strict=True)):
        chosen = before
        if position in changed:
            wanted = tuple(plain(kinds[position]) for kinds in given)
            options = [one for one in strategies(node, factors, {}, axis.size) if one.inputs == wanted]
            if not options:
                return None
            chosen = options[0]
        elif chosen.splits and not all(name in factors.sizes for name, _ in chosen.units):
            return None
        found.append(chosen)
        factors = refine(factors, chosen, axis.size)
    return tuple(found)
