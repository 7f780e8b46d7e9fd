"""One axis as the search for shardings sees it: the program, the plan, and the choices on outer axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ...core.annotations import Leaf, facts, leaf, num_bytes, values
from ...core.errors import CompileError, Where
from ...core.sharding import AxisType, Shard, Sharding, local_shape
from ...ir.cost_protocol import CostModel
from ...ir.expectations import ExpertLoad
from ...ir.program import Axis, Program, Strategy
from ...ops.catalog import op_spec
from ...ops.rules.notation import Factors
from ...strategies.expert_axes import expert_parameters, hops, with_sliced_rows
from ...strategies.rule_book import leaf_strategies, may_pad, strategies
from .coupled_rows import coupling


@dataclass(frozen=True)
class OperandEdge:
    """A value on its way into an operator.

    Attributes:
        source: the operator that produces the value.
        user: the operator that reads it, or the output node.
        position: the position among the user's tensor inputs.
        grad: whether a gradient flows back along the edge.
        additive: whether the user adds this input to its result.
    """

    source: fx.Node
    user: fx.Node
    position: int
    grad: bool
    additive: bool = False


@dataclass(frozen=True)
class ShardingOptions:
    """The plan's constraints on shardings.

    Attributes:
        fixed: (leaf name, axis name) -> the type that the plan fixes.
        sequence_parallel: whether values between tensor-parallel operators may be split along the sequence; if not,
            they are whole (all-reduce instead of reduce-scatter and all-gather).
        context: what a context axis splits in attention: queries (``"all_gather"``), heads (``"ulysses"``), or queries
            and keys (``"ring"``).
        experts: the axes over which experts are spread.
        loads: for layers of experts, the expected number of rows on the busiest rank.
        follows: whether parameters are stored as another program, which they were sharded for, stores them.
    """

    fixed: Mapping[tuple[str, str], AxisType] = field(default_factory=dict)
    sequence_parallel: bool = True
    context: str = "all_gather"
    experts: tuple[str, ...] = ()
    loads: Mapping[fx.Node, ExpertLoad] = field(default_factory=dict)
    follows: bool = False


def stores_state(axis: Axis, experts: Sequence[str]) -> bool:
    """Return whether slices of parameters over ``axis`` are gathered before operators see them."""
    return axis.role in ("data", "context") and axis.name not in experts


@dataclass(frozen=True)
class AxisView:
    """A mesh axis for which strategies are chosen.

    Attributes:
        outer: the axes outside ``axis``, outermost first.
        factors: what the outer axes leave of each operator's factors.
        chosen: the strategies of each operator on the outer axes.
        repeats: how many operators of the whole model a node stands for.
    """

    program: Program
    axis: Axis
    outer: tuple[Axis, ...]
    factors: Mapping[fx.Node, Factors]
    chosen: Mapping[fx.Node, tuple[Strategy, ...]]
    cost: CostModel
    constraints: ShardingOptions
    repeats: Mapping[fx.Node, int]

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the outer axes."""
        return tuple(axis.size for axis in self.outer)

    @property
    def batch_parts(self) -> int:
        """Return the number of data ranks and microbatches among which the outer axes divide a batch."""
        return math.prod(axis.size for axis in self.outer if axis.role in ("data", "time"))

    @property
    def rows(self) -> int:
        """Return the rows of the batch on one rank under the outer axes, rounded up."""
        return -(-self.program.batch_size // self.batch_parts)

    @cached_property
    def spreads_experts(self) -> bool:
        """Return whether each rank of the axis has its own experts.

        They may be those of a mixture, or parameters that the plan shards by name.
        """
        if self.axis.name not in self.constraints.experts:
            return False
        named = any(
            axis == self.axis.name and isinstance(kind, Shard) for (_, axis), kind in self.constraints.fixed.items()
        )
        return named or bool(expert_parameters(self.program.graph))

    def stores(self, info: Leaf) -> bool:
        """Return whether slices of a leaf over this axis only change how a parameter is stored.

        That is so where the axis splits data and no rows are exchanged for experts, see
        :class:`.shard_parameters.ShardParameters`.
        """
        return info.kind == "parameter" and stores_state(self.axis, self.constraints.experts)

    def legal(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        """Return every strategy that ``node``'s rule allows, whatever the role of the axis."""
        enumerate_strategies = strategies if leaf(node) is None else leaf_strategies
        options = enumerate_strategies(node, self.factors[node], cuts, self.axis.size)
        return (*options, *with_sliced_rows(node, options, self.axis)) if self.travels(node) else options

    def travels(self, node: fx.Node) -> bool:
        """Return whether each rank of a model axis sends an operator's rows to the ranks of their experts."""
        return op_spec(node).by_expert and self.axis.role == "model" and bool(hops(self.outer, self.chosen[node]))

    def load(self, node: fx.Node) -> ExpertLoad:
        """Return the load of an operator whose rows travel to the ranks of their experts."""
        return self.constraints.loads.get(node, ExpertLoad()) if hops(self.outer, self.chosen[node]) else ExpertLoad()

    def share(self, node: fx.Node) -> float:
        """Return the fraction of a node's work that the outer axes leave to one rank."""
        return math.prod(strategy.part for strategy in self.chosen[node])

    def local_fraction(self, node: fx.Node, output: int) -> float:
        """Return the fraction of a value that one rank holds under the outer axes."""
        sharding: Sharding = tuple(strategy.outputs[output] for strategy in self.chosen[node])
        shape = values(node)[output].shape
        local = local_shape(shape, sharding, self.outer_sizes)
        return math.prod(have / size for have, size in zip(local, shape, strict=True) if size)

    def local_bytes(self, node: fx.Node, output: int) -> float:
        """Return the bytes of a value that one rank holds under the outer axes."""
        return num_bytes(values(node)[output]) * self.local_fraction(node, output)


def refusal(view: AxisView, edge: OperandEdge) -> CompileError:
    """Return the error for a program in which ``edge`` needs a conversion that is not allowed."""
    axis = view.axis
    if axis.role == "time":
        return _coupled(view, edge)
    leaves = edge.user.op == "output"
    user = "what the model returns" if leaves else edge.user.target
    where: Where = facts(edge.source if leaves else edge.user).where
    info = leaf(edge.source)
    name = info.name if info is not None else str(edge.source.target)
    if axis.role == "context":
        message = f"{user} can run neither whole nor on a part of the sequences of {axis.name}: it would slice {name}"
    else:
        message = f"{name} would have to be gathered over {axis.name} for {user}"
    return CompileError("QN205", message, where=where)


def _coupled(view: AxisView, edge: OperandEdge) -> CompileError:
    """Return the error for a program that cannot compute each microbatch on its own."""
    microbatches = view.axis.size
    coupled = coupling(view.program.graph, view.factors)
    if coupled is None:
        user = edge.user.target if edge.user.op != "output" else "the loss"
        place, reason = edge.source, f"{user} would need values of all {microbatches} microbatches at once"
        unpadded = next((n for n in view.factors if leaf(n) is None and not may_pad(n)), None)
        if unpadded is not None and view.program.batch_size % (view.batch_parts * microbatches):
            return _indivisible_batch(view, unpadded)
    else:
        place, cause = coupled
        reason = f"{cause}, and each of {microbatches} microbatches has rows of its own"
    fix = "use microbatches=1"
    leaves = (leaf(node) for node in view.program.graph.nodes if node.op != "output")
    parameters = {info.name for info in leaves if info is not None and info.kind == "parameter"}
    if parameters.isdisjoint(view.program.captured.changed):
        fix += ', or batch_statistics="microbatch"'
    if view.program.captured.only_rows is not None:  # microbatches have fewer
        fix += ", and x.shape[0] in place of len(x) or of a number of rows"
    return CompileError("QN104", reason, where=facts(place).where, fix=fix)


def _indivisible_batch(view: AxisView, node: fx.Node) -> CompileError:
    """Return the error for a batch that needs padding which ``node`` must not see."""
    return CompileError(
        "QN106",
        f"a batch of {view.program.batch_size} rows does not split evenly into {view.axis.size} microbatches, and "
        f"{node.target} may not see padding: it raises errors for some values, or counts all that it reads",
        where=facts(node).where,
        fix="use a batch that divides over data ranks and microbatches, or microbatches=1",
    )
