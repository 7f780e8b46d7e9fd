"""Program -> ShardedProgram: one integer program per axis chooses how every operator runs.

A plan is constraints: a fixed type for a leaf. There is no other mechanism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from ...core.annotations import needs_grad, origin, shape
from ...core.sharding import AxisType, I, P, R, forward_type
from ...ir.cost_protocol import CostModel
from ...ir.program import Axis, Program, ShardedProgram, Strategy, outputs
from ...ir.repeated_blocks import same_in_every_block
from ...strategies.rule_book import RuleBook, refine
from .axis_search import AxisSearch
from .axis_view import AxisView, ShardingOptions
from .conversion_prices import leaves_as_is
from .follow_sharding import KnownSharding

Solved = dict[Hashable, Mapping[fx.Node, Strategy]]


@dataclass(frozen=True)
class ChooseSharding:
    """Give every value a sharding on every axis.

    Before: %linear = linear(%x, %w)
    After:  %linear: (S(1), S(0)) from %x: (S(0)...) and %w: (R, S(0))
    Ensures: each operator runs a strategy that its rule allows; roles are respected; leaves obey the plan.

    Attributes:
        axes: outermost first.
        constraints: the plan's constraints.
        repeats: how many operators of the whole model a node stands for, see
            :class:`~quintnet_compiler.passes.sharding.fold_blocks.FoldBlocks`.
        known: a program for other sizes of the batch, whose sharding is followed where that is legal.
        solved: earlier solutions for outer axes, which inner ones do not change: for callers that shard one program in
            many ways, with the same rules and prices.

    Raises:
        CompileError: QN104 if a value would have to be exchanged between microbatches, QN203 if a fixed type does
            not divide, QN205 if nothing satisfies the plan.
    """

    axes: tuple[Axis, ...]
    rules: RuleBook
    cost: CostModel
    constraints: ShardingOptions = ShardingOptions()
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    known: ShardedProgram | None = None
    solved: Solved = field(default_factory=dict)

    def __call__(self, program: Program, /) -> ShardedProgram:
        factors = self.rules.factors(program.graph)
        fixed: dict[str, frozenset[tuple[str, AxisType]]] = defaultdict(frozenset)
        for (name, axis_name), kind in self.constraints.fixed.items():
            fixed[name] |= {(axis_name, kind)}
        same = same_in_every_block(program.graph, fixed)
        followed_sharding = KnownSharding.match(program, self.axes, self.known)
        chosen: dict[fx.Node, tuple[Strategy, ...]] = dict.fromkeys(factors, ())
        for position, axis in enumerate(self.axes):
            view = AxisView(
                program, axis, self.axes[:position], factors, chosen, self.cost, self.constraints, self.repeats
            )
            followed_choice = followed_sharding.choice(view) if followed_sharding is not None else None
            for node, strategy in (followed_choice or self._solve(view, same)).items():
                chosen[node] += (strategy,)
                factors[node] = refine(factors[node], strategy, axis.size)
        for node in program.graph.nodes:
            if node.op == "output":
                chosen[node] = self._output_strategies(node, chosen, program)
        return ShardedProgram(program, self.axes, chosen)

    def _solve(self, view: AxisView, same: Mapping[fx.Node, Hashable]) -> Mapping[fx.Node, Strategy]:
        """Return the best choices on one axis. They depend on outer axes, and on the plan's constraints on these."""
        axes, options = (*view.outer, view.axis), self.constraints
        names = {axis.name for axis in axes}
        context = options.context if any(axis.role == "context" for axis in axes) else ""
        experts = tuple(name for name in options.experts if name in names)
        fixed = frozenset(options.fixed.items())
        loads = frozenset(options.loads.items())
        key = view.program.graph, axes, fixed, options.sequence_parallel, context, experts, loads
        if key not in self.solved:
            self.solved[key] = AxisSearch(view, same).cheapest_strategies()
        return self.solved[key]

    def _output_strategies(
        self, node: fx.Node, chosen: Mapping[fx.Node, tuple[Strategy, ...]], program: Program
    ) -> tuple[Strategy, ...]:
        """Return the types in which outputs leave the program, as strategies of the output node."""
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
                    types[-1] = forward_type(chosen[stored[position]][axis_position].outputs[0])
            strategies.append(Strategy(tuple(types), (), "leave"))
        return tuple(strategies)
