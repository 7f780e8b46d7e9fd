"""The integer program of one axis.

Variables: one 0/1 choice per operator and strategy; per edge the joint choice of both ends; per value and conversion
one shared cost. In this form the linear relaxation is integral at the root in practice, and repeated blocks share one
set of variables (after Alpa, Zheng et al. 2022, and AutoParallel; the edge marginals make the relaxation tight).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from ...core.annotations import facts, leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, P, R, plain
from ...ir.program import Strategy, outputs
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ..lowering.padding import mixed
from ..strategies.rule_book import find_cuts, flows
from .axis_view import AxisView, OperandEdge, refusal
from .candidates import Candidates
from .conversion_prices import ConversionPrices, leaves_as_is
from .integer_program import FORBIDDEN, IntegerProgram
from .row_travel import RowTravel

User = tuple[Hashable, int]  # the class of an operator, and the position among its inputs (or outputs)
Together = tuple[tuple[User, int], ...]  # who uses a value, each with how often it is repeated
Shared = dict[tuple[AxisType, AxisType, Together], int]


class AxisSearch:
    """``same``: operators with the same key in repeated blocks share variables."""

    def __init__(self, view: AxisView, same: Mapping[fx.Node, Hashable]) -> None:
        self.view, self.axis, self.factors = view, view.axis, view.factors
        self.candidates, self.conversion = Candidates(view), ConversionPrices(view)
        self.travels = RowTravel(view)
        self.model = IntegerProgram()
        self.first: dict[Hashable, fx.Node] = {}
        self.count: Counter[Hashable] = Counter()
        self.key: dict[fx.Node, Hashable] = {}
        for node in view.factors:
            load = view.constraints.loads.get(node)
            key = (same[node], view.chosen[node], node in self.candidates.split_in_time, load)
            self.key[node] = key
            self.first.setdefault(key, node)
            self.count[key] += view.repeats.get(node, 1)
        self.options_of: dict[Hashable, tuple[Strategy, ...]] = {}
        self.choice: dict[Hashable, list[int]] = {}
        self.forbidden: dict[int, OperandEdge] = {}

    def solve(self) -> dict[fx.Node, Strategy]:
        cuts = find_cuts(self.view.program.graph, self.factors)
        for key, node in self.first.items():
            found = self.candidates(node, cuts[node])
            self.options_of[key] = found
            self.choice[key] = [
                self.model.variable(self._work(node, s) * self.count[key], integral=True, order=i)
                for i, s in enumerate(found)
            ]
            self.model.choose_one(self.choice[key])
        self._edges()
        solution = self.model.solve()
        if solution is None:
            fixed = sorted(name for name, axis in self.view.constraints.fixed if axis == self.axis.name)
            what = f"with {', '.join(fixed[:4])} fixed" if fixed else "of this model"
            raise CompileError(
                "QN205",
                f"no sharding {what} over {self.axis.name}={self.axis.size} is possible",
                fix="fix fewer parameters" if fixed else "",
            )
        for variable, edge in self.forbidden.items():
            if solution[variable] > 0.5:
                raise refusal(self.view, edge)
        picked = {}
        for key, variables in self.choice.items():
            best = max(range(len(variables)), key=lambda i: solution[variables[i]])
            picked[key] = self.options_of[key][best]
        for node in self.factors:
            first = self.first[self.key[node]]
            if self._alike(node, first) and cuts[node] == cuts[first]:
                continue
            if picked[self.key[node]] not in self.view.legal(node, cuts[node]):
                raise CompileError(
                    "QN209", f"{node} got a strategy that its rule does not allow", where=facts(node).where
                )
        return {node: picked[self.key[node]] for node in self.factors}

    def _alike(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether the same strategies are legal for both, given the same cuts."""
        return self.factors[node] == self.factors[other] and flows(node) == flows(other)

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        found, part = leaf(node), strategy.part
        if found is None:
            part *= self.view.load(node).computed if node.target in EXPERT_LAYERS else 1.0
            work = self.view.cost.operator_seconds(node) * self.view.share(node) * part
            return work + self._masks(node, strategy) + self.travels(node, strategy)
        if found.kind != "parameter" or self.axis.role != "model":
            return 0.0
        size = num_bytes(values(node)[0]) * self.view.share(node)
        price = self.view.cost.parameter_seconds(size) * part
        if strategy.outputs[0] is R:
            price += self.view.cost.collective_seconds("all_reduce", size, self.axis.size)
        return price

    def _masks(self, node: fx.Node, strategy: Strategy) -> float:
        """Of zeros in the padding of what an operator reads, and of the gradients of what it makes: each is a pass over
        that value, forward and, where gradients flow, backward. That of a value whose padding is zeros already, which
        only lowering knows, counts too, but parameters are stored with zeros."""
        if not strategy.uneven:
            return 0.0
        how = mixed(node, self.factors[node], (strategy,), (self.axis,))
        masked = [(node, output, 2 * len(zeros)) for output, zeros in enumerate(how.outputs)]
        for given, zeros, ones in zip(tensor_inputs(node), how.inputs, how.ones, strict=True):
            both = needs_grad(node) and needs_grad(given)
            masked += [] if leaf(given) else [(*origin(given), (1 + both) * len(zeros | ones))]
        return sum(
            times * self.view.cost.mask_seconds(num_bytes(values(one)[i]) * self.view.left(one, i) * strategy.part)
            for one, i, times in masked
        )

    # -- edges

    def _edges(self) -> None:
        """Edges of the same classes share variables; all users of a value share its conversion to one type."""
        uses: dict[tuple[fx.Node, int], dict[User, int]] = defaultdict(dict)
        examples: dict[tuple[User, User], OperandEdge] = {}
        for node in self.factors:
            grads = flows(node)[0]
            additive = self.factors[node].additive
            for position, given in enumerate(tensor_inputs(node)):
                source, output = origin(given)
                user = (self.key[node], position)
                often = self.view.repeats.get(node, 1)
                uses[source, output][user] = max(uses[source, output].get(user, 0), often)
                edge = OperandEdge(source, node, position, grads[position], position in additive)
                examples.setdefault(((self.key[source], output), user), edge)
        # Values of one class may differ in who uses them: the last block's go to the head, the others' to a block.
        found: dict[User, Counter[Together]] = defaultdict(Counter)
        for (source, output), users in uses.items():
            found[self.key[source], output][tuple(users.items())] += 1
        for value, groups in found.items():
            shared: Shared = {}
            alone = all(len(group) == 1 for group in groups)
            for user in dict.fromkeys(user for group in groups for user, _ in group):
                times = {group: n * dict(group)[user] for group, n in groups.items() if user in dict(group)}
                self._edge(examples[value, user], value[1], times, None if alone else shared)
        self._sinks()

    def _edge(self, edge: OperandEdge, output: int, times: Mapping[Together, int], shared: Shared | None) -> None:
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
        edge: OperandEdge,
        output: int,
        from_: Mapping[AxisType, list[int]],
        to: Mapping[AxisType, list[int]],
        times: Mapping[Together, int],
        shared: Shared | None,
    ) -> None:
        model = self.model
        joint: dict[tuple[AxisType, AxisType], int] = {}
        value = values(edge.source)[output]
        size = num_bytes(value) * self.view.left(edge.source, output)
        for a in from_:
            for b in to:
                price = self.conversion(edge, a, b, size)
                if price is None:
                    if self.axis.role != "time":
                        continue
                    price = FORBIDDEN  # a way out, so that the refusal can name the place
                pays_here = price == 0 or shared is None
                joint[a, b] = model.variable(price * sum(times.values()) if pays_here else 0.0)
                if price >= FORBIDDEN:
                    self.forbidden[joint[a, b]] = edge
                if not pays_here:
                    assert shared is not None
                    for group, count in times.items():
                        if (a, b, group) not in shared:
                            shared[a, b, group] = model.variable(0.0)
                        both = shared[a, b, group]
                        model.costs[both] = max(model.costs[both], price * count)
                        model.constrain([(both, 1.0), (joint[a, b], -1.0)], 0, math.inf)
        for a, variables in from_.items():
            row = [(j, 1.0) for (x, _), j in joint.items() if x == a]
            model.constrain([*row, *((v, -1.0) for v in variables)], 0, 0)
        for b, variables in to.items():
            row = [(j, 1.0) for (_, y), j in joint.items() if y == b]
            model.constrain([*row, *((v, -1.0) for v in variables)], 0, 0)

    def _sinks(self) -> None:
        graph, carried = self.view.program.graph, self.view.program.carried.values()
        stored, ended = self.view.program.stored, self.view.program.ended
        for position, result in enumerate(outputs(graph)):
            source, output = origin(result)
            key = self.key[source]
            from_: dict[AxisType, list[int]] = defaultdict(list)
            for variable, strategy in zip(self.choice[key], self.options_of[key], strict=True):
                from_[strategy.outputs[output]].append(variable)
            if position in stored:
                free = [a for a in from_ if plain(a) in self._stored_as(stored[position])]
            else:
                settled = {"carried": position in carried, "ended": position in ended}
                free = [a for a in from_ if leaves_as_is(self.axis, a, result, **settled)]
            edge = OperandEdge(source, graph.output_node(), 0, needs_grad(result))
            price = dict.fromkeys(free, 0.0)
            size = num_bytes(values(source)[output]) * self.view.left(source, output)
            for a in from_:
                if a not in price:
                    found = self.conversion(edge, a, P if a is R else I, size)
                    price[a] = FORBIDDEN if found is None else found
            for a, variables in from_.items():
                leaving = self.model.variable(price[a])
                if price[a] >= FORBIDDEN:
                    self.forbidden[leaving] = edge
                self.model.constrain([(leaving, 1.0), *((v, -1.0) for v in variables)], 0, 0)

    def _stored_as(self, parameter: fx.Node) -> set[AxisType]:
        """The types in which a new value of a parameter may leave: that of the parameter costs nothing."""
        return {plain(strategy.outputs[0]) for strategy in self.options_of[self.key[parameter]]}
