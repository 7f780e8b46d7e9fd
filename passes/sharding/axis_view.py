"""One axis as the search for its shardings sees it: the program, the plan, and what the earlier axes chose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ...core.annotations import Leaf, facts, leaf, values
from ...core.errors import CompileError, Where
from ...core.sharding import AxisType, Shard, Sharding, local_shape
from ...ir.cost_protocol import CostModel
from ...ir.expert_load import ExpertLoad
from ...ir.program import Axis, Program, Strategy
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rules.notation import Factors
from ..strategies.expert_axes import expert_parameters, hops, sliced
from ..strategies.rule_book import leaf_strategies, may_pad, strategies
from .coupled_rows import coupling


@dataclass(frozen=True)
class OperandEdge:
    """A value on its way into an operator: what a role needs to know to allow or price a conversion."""

    source: fx.Node
    user: fx.Node
    position: int
    grad: bool
    additive: bool = False


@dataclass(frozen=True)
class Wishes:
    """What a plan asks of shardings.

    ``fixed``: (leaf name, axis name) -> type. ``sequence_parallel``: whether values between tensor-parallel operators
    may be split along the sequence; if not, they are whole (all-reduce instead of reduce-scatter and all-gather).
    ``context``: what a context axis splits of attention: queries (``"all_gather"``), heads (``"ulysses"``), or queries
    and keys (``"ring"``). ``experts``: the axes over which experts are spread. ``loads``: of layers of experts, how
    many rows their busiest rank is expected to get.
    """

    fixed: Mapping[tuple[str, str], AxisType] = field(default_factory=dict)
    sequence_parallel: bool = True
    context: str = "all_gather"
    experts: tuple[str, ...] = ()
    loads: Mapping[fx.Node, ExpertLoad] = field(default_factory=dict)


def stores_state(axis: Axis, experts: Sequence[str]) -> bool:
    """Whether slices of parameters over ``axis`` are gathered before operators see them."""
    return axis.role in ("data", "context") and axis.name not in experts


@dataclass(frozen=True)
class AxisView:
    """``before``: the axes outside of ``axis``; ``chosen``: what each operator does on them; ``factors``: what is left
    of each operator's factors for ``axis``. ``repeats``: how many operators one stands for."""

    program: Program
    axis: Axis
    before: tuple[Axis, ...]
    factors: Mapping[fx.Node, Factors]
    chosen: Mapping[fx.Node, tuple[Strategy, ...]]
    cost: CostModel
    constraints: Wishes
    repeats: Mapping[fx.Node, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.before)

    @property
    def ways(self) -> int:
        """Among how many data ranks and microbatches the earlier axes deal the rows of a batch."""
        return math.prod(axis.size for axis in self.before if axis.role in ("data", "time"))

    @property
    def rows(self) -> int:
        """Rows of the batch that the earlier axes leave a rank; where they do not divide, the most."""
        return -(-self.program.batch_size // self.ways)

    @cached_property
    def spreads_experts(self) -> bool:
        """Whether each rank has experts of its own: of a mixture, or parameters that the plan splits by name."""
        if self.axis.name not in self.constraints.experts:
            return False
        named = any(
            axis == self.axis.name and isinstance(kind, Shard) for (_, axis), kind in self.constraints.fixed.items()
        )
        return named or bool(expert_parameters(self.program.graph))

    def stores(self, found: Leaf) -> bool:
        """Whether slices of a parameter over this axis are no more than how it is stored, see
        :class:`.shard_parameters.ShardParameters`: what the axis splits is data, and no rows are exchanged for
        experts."""
        return found.kind == "parameter" and stores_state(self.axis, self.constraints.experts)

    def legal(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        """Every strategy that ``node``'s rule allows, whatever the role of the axis."""
        make = strategies if leaf(node) is None else leaf_strategies
        found = make(node, self.factors[node], cuts, self.axis.size)
        return (*found, *sliced(node, found, self.axis)) if self.travels(node) else found

    def travels(self, node: fx.Node) -> bool:
        """Whether the rows of an operator travel to the ranks of their experts, from each rank of a model axis."""
        return node.target in EXPERT_LAYERS and self.axis.role == "model" and bool(hops(self.before, self.chosen[node]))

    def load(self, node: fx.Node) -> ExpertLoad:
        """Of the rows that an operator gets, where they travel to the ranks of their experts."""
        return self.constraints.loads.get(node, ExpertLoad()) if hops(self.before, self.chosen[node]) else ExpertLoad()

    def share(self, node: fx.Node) -> float:
        """What fraction of a node's work is left after the earlier axes."""
        return math.prod(strategy.part for strategy in self.chosen[node])

    def left(self, node: fx.Node, output: int) -> float:
        """The fraction of a value that one rank holds under the earlier axes."""
        before: Sharding = tuple(s.outputs[output] for s in self.chosen[node])
        whole = values(node)[output].shape
        held = local_shape(whole, before, self.ranks)
        return math.prod(have / size for have, size in zip(held, whole, strict=True) if size)


def refusal(view: AxisView, edge: OperandEdge) -> CompileError:
    """Why nothing is possible: ``edge`` would need a conversion that must not be."""
    axis = view.axis
    if axis.role == "time":
        return _coupled(view, edge)
    user = edge.user.target if edge.user.op != "output" else "what the model returns"
    where: Where = facts(edge.user if edge.user.op != "output" else edge.source).where
    found = leaf(edge.source)
    name = found.name if found is not None else str(edge.source.target)
    if axis.role == "context":
        what = f"{user} can run neither whole nor on a part of the sequences of {axis.name}: it would slice {name}"
    else:
        what = f"{name} would have to be gathered over {axis.name} for {user}"
    return CompileError("QN205", what, where=where)


def _coupled(view: AxisView, edge: OperandEdge) -> CompileError:
    many = view.axis.size
    found = coupling(view.program.graph, view.factors)
    if found is None:
        user = edge.user.target if edge.user.op != "output" else "the loss"
        place, why = edge.source, f"{user} would need values of all {many} microbatches at once"
    else:
        place, why = found[0], f"{found[1]}, and each of {many} microbatches has rows of its own"
    unpadded = next((n for n in view.factors if found is None and leaf(n) is None and not may_pad(n)), None)
    if unpadded is not None and view.program.batch_size % (view.ways * many):
        return CompileError(
            "QN106",
            f"a batch of {view.program.batch_size} rows does not split evenly into {many} microbatches, and "
            f"{unpadded.target} may not see padding: it raises errors for some values, or counts all that it reads",
            where=facts(unpadded).where,
            fix="use a batch that divides over data ranks and microbatches, or microbatches=1",
        )
    return CompileError(
        "QN104", why, where=facts(place).where, fix='use microbatches=1, or batch_statistics="microbatch"'
    )
