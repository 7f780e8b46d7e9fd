"""Program -> ShardedProgram: one integer program per axis chooses how every operator runs.

A plan is constraints: a fixed type for a leaf. There is no other mechanism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from ...core.annotations import needs_grad, origin, shape
from ...core.sharding import AxisType, I, P, R, plain
from ...ir.cost_protocol import CostModel
from ...ir.program import Axis, Program, ShardedProgram, Strategy, outputs
from ...ir.repeated_blocks import same_in_every_block
from ..strategies.rule_book import RuleBook, refine
from .axis_search import AxisSearch
from .axis_view import AxisView, Wishes
from .conversion_prices import leaves_as_is
from .follow_sharding import KnownSharding

Solved = dict[Hashable, Mapping[fx.Node, Strategy]]


@dataclass(frozen=True)
class ChooseSharding:
    """Give every value a sharding on every axis.

    Before: %linear = linear(%x, %w)
    After:  %linear: (S(1), S(0)) from %x: (S(0)...) and %w: (R, S(0))
    Ensures: each operator runs a strategy that its rule allows; roles are respected; leaves obey the plan.

    ``axes``: outermost first. ``constraints``: what the plan asks. ``repeats``: how many operators one
    stands for, see :class:`~quintnet_compiler.passes.sharding.fold_blocks.FoldBlocks`. ``known``: a program for other
    sizes of the batch, which is followed where that is legal. ``solved``: what was chosen before on outer axes, which
    inner ones do not change: for callers that shard one program in many ways, by the same rules and prices.

    Raises:
        CompileError: QN104 if a value would have to be exchanged between microbatches, QN203 if a fixed type does
            not divide, QN205 if nothing satisfies the plan.
    """

    axes: tuple[Axis, ...]
    rules: RuleBook
    cost: CostModel
    constraints: Wishes = Wishes()
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    known: ShardedProgram | None = None
    solved: Solved = field(default_factory=dict)

    def __call__(self, program: Program, /) -> ShardedProgram:
        factors = self.rules.factors(program.graph)
        fixed: dict[str, frozenset[tuple[str, AxisType]]] = defaultdict(frozenset)
        for (name, axis_name), kind in self.constraints.fixed.items():
            fixed[name] |= {(axis_name, kind)}
        same = same_in_every_block(program.graph, fixed)
        known = KnownSharding.of(program, self.axes, self.known)
        chosen: dict[fx.Node, tuple[Strategy, ...]] = dict.fromkeys(factors, ())
        for position, axis in enumerate(self.axes):
            view = AxisView(
                program, axis, self.axes[:position], factors, chosen, self.cost, self.constraints, self.repeats
            )
            followed = known.choice(view) if known is not None else None
            for node, strategy in (followed or self._solved(view, same)).items():
                chosen[node] += (strategy,)
                factors[node] = refine(factors[node], strategy, axis.size)
        for node in program.graph.nodes:
            if node.op == "output":
                chosen[node] = self._leaving(node, chosen, program)
        return ShardedProgram(program, self.axes, chosen)

    def _solved(self, view: AxisView, same: Mapping[fx.Node, Hashable]) -> Mapping[fx.Node, Strategy]:
        """The best choices on one axis. They depend on the axes outside of it, and on wishes about these."""
        axes, wishes = (*view.before, view.axis), self.constraints
        names = {axis.name for axis in axes}
        context = wishes.context if any(axis.role == "context" for axis in axes) else ""
        experts = tuple(name for name in wishes.experts if name in names)
        fixed = frozenset(wishes.fixed.items())
        loads = frozenset(wishes.loads.items())
        key = view.program.graph, axes, fixed, wishes.sequence_parallel, context, experts, loads
        if key not in self.solved:
            self.solved[key] = AxisSearch(view, same).solve()
        return self.solved[key]

    def _leaving(
        self, node: fx.Node, chosen: Mapping[fx.Node, tuple[Strategy, ...]], program: Program
    ) -> tuple[Strategy, ...]:
        """The types in which the program's outputs leave it, as a strategy of the output node."""
        carried, stored, strategies = program.carried.values(), program.stored, []
        for axis_position, axis in enumerate(self.axes):
            types: list[AxisType] = []
            for position, result in enumerate(outputs(node.graph)):
                source, output = origin(result)
                kind = chosen[source][axis_position].outputs[output]
                as_term = kind is R and needs_grad(result) and shape(result) == ()
                ended = position in program.ended
                as_is = leaves_as_is(axis, kind, result, carried=position in carried, ended=ended)
                types.append(kind if as_is else P if as_term else I)
                if position in stored:
                    types[-1] = plain(chosen[stored[position]][axis_position].outputs[0])
            strategies.append(Strategy(tuple(types), (), "leave"))
        return tuple(strategies)
