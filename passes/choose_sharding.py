"""Program -> ShardedProgram: one integer program per axis chooses how every operator runs.

Variables: one 0/1 choice per operator and strategy; per edge the joint choice of both ends; per value and conversion
one shared cost. In this form the linear relaxation is integral at the root in practice, and repeated blocks share one
set of variables (after Alpa, Zheng et al. 2022, and AutoParallel; the edge marginals make the relaxation tight).

A plan is constraints: a fixed type for a leaf. There is no other mechanism.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..annotations import (
    facts,
    is_getitem,
    leaf,
    needs_grad,
    num_bytes,
    origin,
    shape,
    tensor_inputs,
    values,
)
from ..attention_ops import attention
from ..comm_ops import lower_conversion, share
from ..cost import CostModel
from ..errors import CompileError, Where
from ..expert_ops import expert_linear
from ..program import Axis, Program, ShardedProgram, Strategy, outputs
from ..sharding import AxisType, I, P, R, S, Shard, Sharding, gradient, local_shape, plain
from .batch_factors import batch_factors
from .expert_axes import expert_parameters, travelling
from .integer_program import FORBIDDEN, IntegerProgram
from .repeated_blocks import same_in_every_block
from .rule_notation import Factors
from .strategies import RuleBook, find_cuts, flows, leaf_strategies, refine, strategies

aten = torch.ops.aten
# products, and the position of the operand that may be a weight
CONTRACTIONS: Mapping[Any, int] = {
    **dict.fromkeys([aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default], 1),
    aten.addmm.default: 2,
    expert_linear: 2,
}
DISCOURAGED = 1e2  # how much dearer a conversion is that the axis' role avoids


@dataclass(frozen=True)
class Edge:
    """A value on its way into an operator: what a role needs to know to allow or price a conversion."""

    source: fx.Node
    user: fx.Node
    position: int
    grad: bool
    additive: bool = False


@dataclass(frozen=True)
class ChooseSharding:
    """Give every value a sharding on every axis.

    Before: %linear = linear(%x, %w)
    After:  %linear: (S(1), S(0)) from %x: (S(0)...) and %w: (R, S(0))
    Ensures: each operator runs a strategy that its rule allows; roles are respected; leaves obey ``fixed``.

    ``axes``: outermost first. ``fixed``: (leaf name, axis name) -> type. ``sequence_parallel``: whether values between
    tensor-parallel operators may be split along the sequence; if not, they are whole (all-reduce instead of
    reduce-scatter and all-gather). ``context``: what a context axis splits of attention: queries (``"all_gather"``),
    heads (``"ulysses"``), or queries and keys (``"ring"``). ``experts``: the axes over which experts are spread.

    Raises:
        CompileError: QN104 if a value would have to be exchanged between microbatches, QN203 if a fixed type does
            not divide, QN205 if nothing satisfies the plan.
    """

    axes: tuple[Axis, ...]
    rules: RuleBook
    cost: CostModel
    fixed: Mapping[tuple[str, str], AxisType] = field(default_factory=dict)
    sequence_parallel: bool = True
    context: str = "all_gather"
    experts: tuple[str, ...] = ()

    def __call__(self, program: Program, /) -> ShardedProgram:
        factors = self.rules.factors(program.graph)
        same = same_in_every_block(program.graph)
        chosen: dict[fx.Node, tuple[Strategy, ...]] = dict.fromkeys(factors, ())
        for position, axis in enumerate(self.axes):
            ranks = tuple(a.size for a in self.axes[:position])
            search = _AxisSearch(self, program, axis, factors, same, chosen, ranks)
            picked = search.solve()
            for node, strategy in picked.items():
                chosen[node] += (strategy,)
                factors[node] = refine(factors[node], strategy, axis.size)
        for node in program.graph.nodes:
            if node.op == "output":
                chosen[node] = self._leaving(node, chosen)
        return ShardedProgram(program, self.axes, chosen)

    def _leaving(self, node: fx.Node, chosen: Mapping[fx.Node, tuple[Strategy, ...]]) -> tuple[Strategy, ...]:
        """The types in which the program's outputs leave it, as a strategy of the output node."""
        strategies = []
        for axis_position, axis in enumerate(self.axes):
            types: list[AxisType] = []
            for result in outputs(node.graph):
                source, output = origin(result)
                kind = chosen[source][axis_position].outputs[output]
                as_term = kind is R and needs_grad(result) and shape(result) == ()
                types.append(kind if leaves_as_is(axis, kind, result) else P if as_term else I)
            strategies.append(Strategy(tuple(types), (), "leave"))
        return tuple(strategies)


def leaves_as_is(axis: Axis, kind: AxisType, result: fx.Node) -> bool:
    """Whether the runtime settles an output of type ``kind``: it adds up a partial scalar, and joins the slices of
    microbatches and then of data ranks. Everything else is converted to I inside the graph."""
    if kind is I or (kind is R and not needs_grad(result)):
        return True
    if kind is P:
        return shape(result) == ()
    return isinstance(kind, Shard) and axis.role in ("time", "data")


class _AxisSearch:
    """The integer program of one axis."""

    def __init__(
        self,
        options: ChooseSharding,
        program: Program,
        axis: Axis,
        factors: Mapping[fx.Node, Factors],
        same: Mapping[fx.Node, Hashable],
        chosen: Mapping[fx.Node, tuple[Strategy, ...]],
        ranks: tuple[int, ...],
    ) -> None:
        self.options, self.program, self.axis, self.factors = options, program, axis, factors
        self.chosen, self.ranks = chosen, ranks
        # What the model makes of the batch: no microbatch may compute it for all the others.
        self.split_in_time = _made_of_the_batch(program.graph) if axis.role == "time" else frozenset()
        self.key: dict[fx.Node, Hashable] = {n: (same[n], chosen[n], n in self.split_in_time) for n in factors}
        self.samples = batch_factors(program.graph, factors) if axis.role == "context" else {}
        self.work = _made_of_the_batch(program.graph) if axis.role == "context" else frozenset()
        spread = axis.name in options.experts
        self.expert_parameters = expert_parameters(program.graph) if spread else frozenset[fx.Node]()
        self.weights = _contraction_weights(program.graph) if axis.role == "model" else frozenset()
        # What any collective costs at least, in moves of a typical activation: without it a collective of a few
        # statistics looks free, and the search trades one large move for a layout full of small ones.
        sizes = sorted(num_bytes(v) for n in factors if leaf(n) is None and needs_grad(n) for v in values(n))
        typical = sizes[len(sizes) // 2] if sizes else 0
        self.least = 0.1 * options.cost.collective_seconds("all_gather", typical / math.prod(ranks), axis.size)
        self.model = IntegerProgram()
        self.first: dict[Hashable, fx.Node] = {}
        self.count: Counter[Hashable] = Counter()
        for node in factors:
            self.first.setdefault(self.key[node], node)
            self.count[self.key[node]] += 1
        self.options_of: dict[Hashable, tuple[Strategy, ...]] = {}
        self.choice: dict[Hashable, list[int]] = {}
        self.forbidden: dict[int, Edge] = {}

    def solve(self) -> dict[fx.Node, Strategy]:
        cuts = find_cuts(self.program.graph, self.factors)
        for key, node in self.first.items():
            found = self._strategies(node, cuts[node])
            self.options_of[key] = found
            self.choice[key] = [
                self.model.variable(self._work(node, s) * self.count[key] + 1e-15 * i, integral=True)
                for i, s in enumerate(found)
            ]
            self.model.choose_one(self.choice[key])
        self._edges()
        solution = self.model.solve()
        if solution is None:
            raise CompileError(
                "QN205", f"no sharding over {self.axis.name} satisfies the plan", fix="fix fewer parameters"
            )
        for variable, edge in self.forbidden.items():
            if solution[variable] > 0.5:
                raise self._refusal(edge)
        picked = {}
        for key, variables in self.choice.items():
            best = max(range(len(variables)), key=lambda i: solution[variables[i]])
            picked[key] = self.options_of[key][best]
        for node in self.factors:
            first = self.first[self.key[node]]
            if self._alike(node, first) and cuts[node] == cuts[first]:
                continue
            if picked[self.key[node]] not in self._legal(node, cuts[node]):
                raise CompileError(
                    "QN209", f"{node} got a strategy that its rule does not allow", where=facts(node).where
                )
        return {node: picked[self.key[node]] for node in self.factors}

    def _alike(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether the same strategies are legal for both, given the same cuts."""
        return self.factors[node] == self.factors[other] and flows(node) == flows(other)

    def _legal(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        """Every strategy that ``node``'s rule allows, whatever the role of the axis."""
        make = strategies if leaf(node) is None else leaf_strategies
        return make(node, self.factors[node], cuts, self.axis.size)

    # -- strategies and their prices

    def _strategies(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        found, options = leaf(node), self._legal(node, cuts)
        if node.target is expert_linear and self.axis.name in self.options.experts:
            options = travelling(node, options, self.axis)
        elif node.target is not attention or self.axis.role != "context":
            options = tuple(s for s in options if not s.exchanges)
        if found is None and self.axis.role == "context":
            return self._within_samples(node, options)
        if found is None:
            if node not in self.split_in_time:
                return options
            parts = tuple(s for s in options if not s.label.startswith("replicated"))
            if not parts:
                raise self._refusal(Edge(node, node, 0, grad=True))
            return parts
        fixed = self.options.fixed.get((found.name, self.axis.name))
        if fixed is not None:
            allowed = [s for s in options if s.outputs[0] == fixed or plain(s.outputs[0]) == plain(fixed) is I]
            if not allowed:
                left = local_shape(shape(node), tuple(s.outputs[0] for s in self.chosen[node]), self.ranks)
                raise CompileError(
                    "QN203",
                    f"{found.name} of shape {tuple(left)} cannot be {fixed} over {self.axis.name}={self.axis.size}",
                    fix=f"use one of {', '.join(str(s.outputs[0]) for s in options)}",
                )
            return tuple(allowed)
        if node in self.expert_parameters:
            return tuple(s for s in options if s.outputs[0] == S(0))
        if self.axis.role in ("time", "context"):
            wanted: AxisType = R if found.trainable else I
        elif self.axis.role == "data":
            wanted = S(0) if found.kind == "input" and found.batched else R if found.trainable else I
        elif found.kind == "parameter":
            shards = tuple(s for s in options if isinstance(s.outputs[0], Shard))
            return shards if node in self.weights and shards else options
        else:
            wanted = I
        return tuple(s for s in options if s.outputs[0] == wanted) or self._indivisible(node)

    def _within_samples(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """A context axis splits sequences, never the batch; and products with weights must be split if they can be."""
        rows = self.program.batch_size // math.prod(
            axis.size for axis in self.options.axes[: len(self.ranks)] if axis.role in ("data", "time")
        )

        def whole_samples(strategy: Strategy) -> bool:
            if not strategy.splits:
                return True
            name, cut = strategy.factor
            return name.partition("+")[0] not in self.samples[node] or cut >= rows

        found = tuple(s for s in options if whole_samples(s))
        if node.target in (aten.scaled_dot_product_attention.default, attention):
            return self._attention(node, found)
        if node in self.work and node.target in CONTRACTIONS:
            found = tuple(s for s in found if s.splits and self._sequence(node, s)) or found
        return found

    def _attention(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The queries, the heads, or queries and keys, as the plan says. Where no ring is possible (a mask of the
        user's own), the queries; whole where neither the sequence nor the heads divide."""
        splits = [(s.factor[0].rstrip("oi"), s) for s in options if s.splits]
        found: tuple[Strategy, ...] = ()
        for wanted in {"all_gather": [{"s"}], "ulysses": [{"g", "r"}], "ring": [{"s+t"}, {"s"}]}[self.options.context]:
            found = found or tuple(s for name, s in splits if name in wanted)
        if not found and self.options.context == "ulysses":
            heads, size = shape(node)[-3] if len(shape(node)) > 2 else 1, self.axis.size
            raise CompileError(
                "QN203",
                f"{heads} heads (after the other axes) cannot be exchanged for sequences over {self.axis.name}={size}",
                where=facts(node).where,
                fix='use context="all_gather"',
            )
        return found or tuple(s for s in options if not s.exchanges)

    def _sequence(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether a strategy leaves the weight as it is."""
        return strategy.inputs[CONTRACTIONS[node.target]] in (I, R)

    def _indivisible(self, node: fx.Node) -> tuple[Strategy, ...]:
        found = leaf(node)
        assert found is not None
        rows, size = self.program.batch_size, self.axis.size
        already = math.prod(self.ranks)
        raise CompileError(
            "QN106",
            f"a batch of {rows} does not divide over {self.axis.name}={size}"
            + (f" after {already} ways of the other axes" if already > 1 else ""),
            fix=f"use a batch of {max(1, rows // (size * already)) * size * already} or a multiple of {size * already}",
        )

    def _share(self, node: fx.Node) -> float:
        """What fraction of a node's work is left after the earlier axes."""
        left = 1.0
        for strategy, ranks in zip(self.chosen[node], self.ranks, strict=True):
            left /= ranks if strategy.splits else 1
        return left

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        part = 1 / self.axis.size if strategy.splits else 1.0
        found = leaf(node)
        if found is None:
            return self.options.cost.operator_seconds(node) * self._share(node) * part
        if found.kind != "parameter" or self.axis.role != "model":
            return 0.0
        size = num_bytes(values(node)[0]) * self._share(node)
        price = self.options.cost.parameter_seconds(size) * part
        if strategy.outputs[0] is R:
            price += self.options.cost.collective_seconds("all_reduce", size, self.axis.size)
        return price

    # -- edges

    def _edges(self) -> None:
        """Edges of the same classes share variables; conversions of one value to one type are paid once."""
        found: dict[tuple[Hashable, int], Counter[tuple[Hashable, int]]] = defaultdict(Counter)
        examples: dict[tuple[Hashable, int, Hashable, int], Edge] = {}
        for node in self.factors:
            grads = flows(node)[0]
            additive = self.factors[node].additive
            for position, given in enumerate(tensor_inputs(node)):
                source, output = origin(given)
                a, b = (self.key[source], output), (self.key[node], position)
                found[a][b] += 1
                examples.setdefault((*a, *b), Edge(source, node, position, grads[position], position in additive))
        for (source_key, output), users in found.items():
            shared: dict[tuple[AxisType, AxisType], int] = {}
            for (user_key, position), times in users.items():
                edge = examples[source_key, output, user_key, position]
                self._edge(edge, output, times, shared if len(users) > 1 else None)
        self._sinks()

    def _edge(self, edge: Edge, output: int, times: int, shared: dict[tuple[AxisType, AxisType], int] | None) -> None:
        sources, targets = self.key[edge.source], self.key[edge.user]
        from_: dict[AxisType, list[int]] = defaultdict(list)
        to: dict[AxisType, list[int]] = defaultdict(list)
        for variable, strategy in zip(self.choice[sources], self.options_of[sources], strict=True):
            from_[strategy.outputs[output]].append(variable)
        for variable, strategy in zip(self.choice[targets], self.options_of[targets], strict=True):
            to[strategy.inputs[edge.position]].append(variable)
        self._joint(edge, output, from_, to, times, shared)

    def _joint(
        self,
        edge: Edge,
        output: int,
        from_: Mapping[AxisType, list[int]],
        to: Mapping[AxisType, list[int]],
        times: int,
        shared: dict[tuple[AxisType, AxisType], int] | None,
    ) -> None:
        model = self.model
        joint: dict[tuple[AxisType, AxisType], int] = {}
        value = values(edge.source)[output]
        size = num_bytes(value) * self._left(edge.source, output)
        for a in from_:
            for b in to:
                price = self._conversion(edge, a, b, size)
                if price is None:
                    if self.axis.role != "time":
                        continue
                    price = FORBIDDEN  # a way out, so that the refusal can name the place
                pays_here = price == 0 or shared is None
                joint[a, b] = model.variable(price * times if pays_here else 0.0)
                if price >= FORBIDDEN:
                    self.forbidden[joint[a, b]] = edge
                if not pays_here:
                    assert shared is not None
                    if (a, b) not in shared:
                        shared[a, b] = model.variable(0.0)
                    both = shared[a, b]
                    model.costs[both] = max(model.costs[both], price * times)
                    model.constrain([(both, 1.0), (joint[a, b], -1.0)], 0, math.inf)
        for a, variables in from_.items():
            row = [(j, 1.0) for (x, _), j in joint.items() if x == a]
            model.constrain([*row, *((v, -1.0) for v in variables)], 0, 0)
        for b, variables in to.items():
            row = [(j, 1.0) for (_, y), j in joint.items() if y == b]
            model.constrain([*row, *((v, -1.0) for v in variables)], 0, 0)

    def _sinks(self) -> None:
        graph = self.program.graph
        for result in outputs(graph):
            source, output = origin(result)
            key = self.key[source]
            from_: dict[AxisType, list[int]] = defaultdict(list)
            for variable, strategy in zip(self.choice[key], self.options_of[key], strict=True):
                from_[strategy.outputs[output]].append(variable)
            free = [a for a in from_ if leaves_as_is(self.axis, a, result)]
            edge = Edge(source, graph.output_node(), 0, needs_grad(result))
            price = dict.fromkeys(free, 0.0)
            size = num_bytes(values(source)[output]) * self._left(source, output)
            for a in from_:
                if a not in price:
                    found = self._conversion(edge, a, P if a is R else I, size)
                    price[a] = FORBIDDEN if found is None else found
            for a, variables in from_.items():
                leaving = self.model.variable(price[a])
                if price[a] >= FORBIDDEN:
                    self.forbidden[leaving] = edge
                self.model.constrain([(leaving, 1.0), *((v, -1.0) for v in variables)], 0, 0)

    def _left(self, node: fx.Node, output: int) -> float:
        """The fraction of a value that one rank holds under the earlier axes."""
        before: Sharding = tuple(s.outputs[output] for s in self.chosen[node])
        kept = 1.0
        for kind, ranks in zip(before, self.ranks, strict=True):
            kept /= ranks if isinstance(kind, Shard) else 1
        return kept

    def _conversion(self, edge: Edge, a: AxisType, b: AxisType, size: float) -> float | None:
        """Seconds of a conversion, forward and backward; None where it has no meaning or must never be used."""
        if a == b or (not edge.grad and plain(a) == plain(b)):
            return 0.0
        if not edge.grad and (b is P and not edge.additive):
            return None
        if isinstance(a, Shard) and b is P:
            return None
        if b is P and not edge.additive and edge.user.op != "output" and self.axis.role != "time":
            # correct, and useful in time alone, where nothing adds up what a whole value (a penalty) is added to
            return None
        price = self._move(a, b, size)
        if edge.grad:
            price += self._move(gradient(b), gradient(a), size)
        return self._role(edge, a, b, price)

    def _move(self, a: AxisType, b: AxisType, size: float) -> float:
        op, _ = lower_conversion(a, b)
        if op is None or op is share:
            return 0.0
        name = str(op._schema.name).partition("::")[2]
        least = 0.0 if name.startswith("shard_") else self.least
        return least + self.options.cost.collective_seconds(name, size, self.axis.size)

    def _role(self, edge: Edge, a: AxisType, b: AxisType, price: float) -> float | None:
        source = leaf(edge.source)
        if self.axis.role == "time":
            whole_to_slice = not edge.grad and plain(a) is I and isinstance(b, Shard)
            share = b is P and plain(a) is I
            return price if whole_to_slice or share or (a is R and b is I) else FORBIDDEN
        if self.axis.role == "data":
            # rows may be exchanged for experts, where a plan spreads what one-hot dispatch sends them to
            exchanges = isinstance(b, Shard) and self.axis.name in self.options.experts
            gathers = isinstance(a, Shard) and not exchanges
            return price * DISCOURAGED if gathers else price
        if self.axis.role == "context":
            # a parameter's slices would not save its memory; sequences are gathered for what reads all of them
            return FORBIDDEN if source is not None and source.kind == "parameter" and isinstance(b, Shard) else price
        if source is not None and source.kind == "parameter" and isinstance(a, Shard):
            return FORBIDDEN
        if not self.options.sequence_parallel and edge.grad and self._residual(a, b):
            return price * DISCOURAGED
        return price

    def _residual(self, a: AxisType, b: AxisType) -> bool:
        """Whether a conversion enters or leaves a split of values that plain tensor parallelism keeps whole."""
        slices = isinstance(b, Shard) and not isinstance(a, Shard)
        return slices or (isinstance(a, Shard) and plain(b) is I)

    def _refusal(self, edge: Edge) -> CompileError:
        where: Where = facts(edge.user if edge.user.op != "output" else edge.source).where
        if self.axis.role == "time":
            return CompileError(
                "QN104",
                f"{edge.user.target if edge.user.op != 'output' else 'the loss'} needs values of all "
                f"{self.axis.size} microbatches at once (in-batch statistics, or a loss that couples samples)",
                where=where,
                fix="use microbatches=1",
            )
        return CompileError(
            "QN205",
            f"a parameter would have to be gathered over {self.axis.name} for {edge.user.target}",
            where=where,
            fix="let the plan leave this parameter open",
        )


def _made_of_the_batch(graph: fx.Graph) -> frozenset[fx.Node]:
    """Operators that depend on the batch and on a parameter."""
    batched: set[fx.Node] = set()
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        found = leaf(node) if node.op == "placeholder" else None
        if found is not None:
            if found.batched:
                batched.add(node)
            elif found.kind == "parameter":
                trained.add(node)
        elif node.op == "call_function":
            for kind in (batched, trained):
                if any(source in kind for source in node.all_input_nodes):
                    kind.add(node)
    return frozenset(n for n in batched & trained if n.op == "call_function")


def _contraction_weights(graph: fx.Graph) -> frozenset[fx.Node]:
    """Parameters that are the second operand of a matmul: what tensor parallelism is there to split."""
    found = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node.target not in CONTRACTIONS:
            continue
        weight = node.args[CONTRACTIONS[node.target]]
        while isinstance(weight, fx.Node):
            kind = leaf(weight)
            if kind is not None:
                if kind.kind == "parameter":
                    found.add(weight)
                break
            if weight.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
                break
            weight = weight.args[0]
    return frozenset(found)
