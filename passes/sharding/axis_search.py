"""The integer program of one axis.

Variables: one 0/1 choice per operator and strategy; per edge the joint choice of both ends; per value and conversion
one shared cost. In this form the linear relaxation is integral at the root in practice, and repeated blocks share one
set of variables (after Alpa, Zheng et al. 2022, and AutoParallel; the edge marginals make the relaxation tight).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from ...core.annotations import facts, leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, P, R, forward_type
from ...ir.program import Strategy, outputs
from ...ops.catalog import op_spec
from ...strategies.cuts import find_cuts
from ...strategies.padding_fills import padding_fills
from ...strategies.rule_book import flows
from .axis_view import AxisView, OperandEdge, refusal
from .candidates import Candidates
from .conversion_prices import ConversionPrices, leaves_as_is
from .integer_program import FORBIDDEN_SECONDS, IntegerProgram
from .row_travel import RowTravel

User = tuple[Hashable, int]  # the class of an operator, and the position among its inputs (or outputs)
UserGroup = tuple[tuple[User, int], ...]  # all users of a value, each with the number of its repetitions
SharedVariables = dict[tuple[AxisType, AxisType, UserGroup], int]  # one variable per conversion and group of users
VariablesOfType = Mapping[AxisType, list[int]]  # the variables of the strategies that produce (or read) a type


class AxisSearch:
    """The integer program that chooses a strategy for every operator on one axis.

    Attributes:
        key: the class of each operator; operators with equal keys in ``same`` (of repeated blocks) share variables.
        first: the first operator of each class.
        count: how many operators a class has, with repetitions.
        options_of: the strategies of each class.
        choice: the variables of a class, one for each strategy.
        forbidden: variables that stand for a conversion that must not be, with its edge.
    """

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

    def cheapest_strategies(self) -> dict[fx.Node, Strategy]:
        """Return the cheapest strategy of every operator.

        Raises:
            CompileError: QN104, QN106 or QN205 if no choice satisfies the plan.
        """
        cuts = find_cuts(self.view.program.graph, self.factors)
        for key, node in self.first.items():
            self._add_choice(key, node, self.candidates(node, cuts[node]))
        self._edges()
        solution = self.model.solve()
        if solution is None:
            raise self._unsolvable()
        for variable, edge in self.forbidden.items():
            if solution[variable] > 0.5:
                raise refusal(self.view, edge)
        picked = {}
        for key, variables in self.choice.items():
            best = max(range(len(variables)), key=lambda i: solution[variables[i]])
            picked[key] = self.options_of[key][best]
        self._check_classes(picked, cuts)
        return {node: picked[self.key[node]] for node in self.factors}

    def _add_choice(self, key: Hashable, node: fx.Node, options: tuple[Strategy, ...]) -> None:
        self.options_of[key] = options
        self.choice[key] = [
            self.model.variable(self._work(node, strategy) * self.count[key], integral=True, order=order)
            for order, strategy in enumerate(options)
        ]
        self.model.choose_one(self.choice[key])

    def _unsolvable(self) -> CompileError:
        fixed = sorted(name for name, axis in self.view.constraints.fixed if axis == self.axis.name)
        subject = f"with {', '.join(fixed[:4])} fixed" if fixed else "of this model"
        return CompileError(
            "QN205",
            f"no sharding {subject} over {self.axis.name}={self.axis.size} is possible",
            fix="fix fewer parameters" if fixed else "",
        )

    def _check_classes(self, picked: Mapping[Hashable, Strategy], cuts: Mapping[fx.Node, dict[str, set[int]]]) -> None:
        """Raise if the strategy of a class is not legal for one of its operators."""
        for node in self.factors:
            first = self.first[self.key[node]]
            if self._same_rule(node, first) and cuts[node] == cuts[first]:
                continue
            if picked[self.key[node]] not in self.view.legal(node, cuts[node]):
                raise CompileError(
                    "QN209", f"{node} got a strategy that its rule does not allow", where=facts(node).where
                )

    def _same_rule(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether the same strategies are legal for both nodes if their cuts are the same."""
        return self.factors[node] == self.factors[other] and flows(node) == flows(other)

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        """Return the seconds that a strategy takes on one rank, without conversions."""
        info = leaf(node)
        if info is None:
            computed = self.view.load(node).computed if op_spec(node).by_expert else 1.0
            part = strategy.part * computed
            work = self.view.cost.operator_seconds(node) * self.view.share(node) * part
            return work + self._masks(node, strategy) + self.travels(node, strategy)
        if info.kind != "parameter" or self.axis.role != "model":
            return 0.0
        size = num_bytes(values(node)[0]) * self.view.share(node)
        price = self.view.cost.parameter_seconds(size) * strategy.part
        if strategy.outputs[0] is R:
            price += self.view.cost.collective_seconds("all_reduce", size, self.axis.size)
        return price

    def _masks(self, node: fx.Node, strategy: Strategy) -> float:
        """Return the seconds of masks that clear padding in the inputs of an operator and in gradients of its outputs.

        Each mask is a pass over a value, forward and, where gradients flow, backward. Values whose padding is zero
        already count too, since only lowering knows them; parameters do not, since they are stored with zeros.
        """
        if not strategy.uneven:
            return 0.0
        masks = padding_fills(node, self.factors[node], (strategy,), (self.axis,))
        masked = [(node, output, 2 * len(zeros)) for output, zeros in enumerate(masks.outputs)]
        for operand, zeros, ones in zip(tensor_inputs(node), masks.inputs, masks.ones, strict=True):
            directions = 2 if needs_grad(node) and needs_grad(operand) else 1
            if leaf(operand) is None:
                masked.append((*origin(operand), directions * len(zeros | ones)))
        return sum(
            passes * self.view.cost.mask_seconds(self.view.local_bytes(source, output) * strategy.part)
            for source, output, passes in masked
        )

    # -- edges

    def _edges(self) -> None:
        """Add the joint choices of all edges.

        Edges of the same classes share variables; all users of a value share its conversion to one type.
        """
        uses: dict[tuple[fx.Node, int], dict[User, int]] = defaultdict(dict)
        examples: dict[tuple[User, User], OperandEdge] = {}
        for node in self.factors:
            grads = flows(node)[0]
            additive = self.factors[node].additive
            for position, operand in enumerate(tensor_inputs(node)):
                source, output = origin(operand)
                user = (self.key[node], position)
                repeats = self.view.repeats.get(node, 1)
                uses[source, output][user] = max(uses[source, output].get(user, 0), repeats)
                edge = OperandEdge(source, node, position, grads[position], position in additive)
                examples.setdefault(((self.key[source], output), user), edge)
        # Values of one class may have different users: the last block's go to the head, the others' to a block.
        user_groups: dict[User, Counter[UserGroup]] = defaultdict(Counter)
        for (source, output), users in uses.items():
            user_groups[self.key[source], output][tuple(users.items())] += 1
        for value, groups in user_groups.items():
            shared: SharedVariables | None = None if all(len(group) == 1 for group in groups) else {}
            for user in dict.fromkeys(user for group in groups for user, _ in group):
                times = {group: n * dict(group)[user] for group, n in groups.items() if user in dict(group)}
                self._edge(examples[value, user], value[1], times, shared)
        self._sinks()

    def _edge(
        self, edge: OperandEdge, output: int, times: Mapping[UserGroup, int], shared: SharedVariables | None
    ) -> None:
        """Add the joint choice of a value's producer and one user.

        ``times``: how often the edge occurs, for each group of users. ``shared``: the conversions that other users of
        the value share; None where it has a single user.
        """
        source_key, user_key = self.key[edge.source], self.key[edge.user]
        producers: dict[AxisType, list[int]] = defaultdict(list)
        readers: dict[AxisType, list[int]] = defaultdict(list)
        for variable, strategy in zip(self.choice[source_key], self.options_of[source_key], strict=True):
            producers[strategy.outputs[output]].append(variable)
        for variable, strategy in zip(self.choice[user_key], self.options_of[user_key], strict=True):
            readers[strategy.inputs[edge.position]].append(variable)
        self._joint(edge, output, producers, readers, times, shared)

    def _joint(
        self,
        edge: OperandEdge,
        output: int,
        producers: VariablesOfType,
        readers: VariablesOfType,
        times: Mapping[UserGroup, int],
        shared: SharedVariables | None,
    ) -> None:
        joint: dict[tuple[AxisType, AxisType], int] = {}
        size = self.view.local_bytes(edge.source, output)
        for a, b in itertools.product(producers, readers):
            price = self.conversion(edge, a, b, size)
            if price is None and self.axis.role != "time":
                continue
            if price is None:
                price = FORBIDDEN_SECONDS  # keep the program solvable, so that the refusal can name the edge
            shares_conversion = price != 0 and shared is not None
            joint[a, b] = self.model.variable(0.0 if shares_conversion else price * sum(times.values()))
            if price >= FORBIDDEN_SECONDS:
                self.forbidden[joint[a, b]] = edge
            if price != 0 and shared is not None:
                self._share_conversion((a, b), joint[a, b], price, times, shared)
        for a, variables in producers.items():
            self._equal_sums([j for (produced, _), j in joint.items() if produced == a], variables)
        for b, variables in readers.items():
            self._equal_sums([j for (_, read), j in joint.items() if read == b], variables)

    def _share_conversion(
        self,
        types: tuple[AxisType, AxisType],
        joint: int,
        price: float,
        times: Mapping[UserGroup, int],
        shared: SharedVariables,
    ) -> None:
        """Let all users of a value that need the same conversion pay for it once."""
        for group, count in times.items():
            if (*types, group) not in shared:
                shared[*types, group] = self.model.variable(0.0)
            converted = shared[*types, group]
            self.model.costs[converted] = max(self.model.costs[converted], price * count)
            self.model.constrain([(converted, 1.0), (joint, -1.0)], 0, math.inf)

    def _equal_sums(self, first: list[int], second: list[int]) -> None:
        self.model.constrain([*((v, 1.0) for v in first), *((v, -1.0) for v in second)], 0, 0)

    def _sinks(self) -> None:
        """Add the conversions of the program's outputs to the types in which the runtime takes them."""
        graph = self.view.program.graph
        for position, result in enumerate(outputs(graph)):
            source, output = origin(result)
            key = self.key[source]
            producers: dict[AxisType, list[int]] = defaultdict(list)
            for variable, strategy in zip(self.choice[key], self.options_of[key], strict=True):
                producers[strategy.outputs[output]].append(variable)
            edge = OperandEdge(source, graph.output_node(), 0, needs_grad(result))
            for a, variables in producers.items():
                price = 0.0 if self._leaves_as_is(position, a, result) else self._leaving_price(edge, a, output)
                leaving = self.model.variable(price)
                if price >= FORBIDDEN_SECONDS:
                    self.forbidden[leaving] = edge
                self._equal_sums([leaving], variables)

    def _leaves_as_is(self, position: int, kind: AxisType, result: fx.Node) -> bool:
        program = self.view.program
        if position in program.stored:
            return forward_type(kind) in self._stored_types(program.stored[position])
        carried = position in program.carried.values()
        return leaves_as_is(self.axis, kind, result, carried=carried, ended=position in program.ended)

    def _leaving_price(self, edge: OperandEdge, kind: AxisType, output: int) -> float:
        size = self.view.local_bytes(edge.source, output)
        price = self.conversion(edge, kind, P if kind is R else I, size)
        return FORBIDDEN_SECONDS if price is None else price

    def _stored_types(self, parameter: fx.Node) -> set[AxisType]:
        """Return the types in which a new value of a parameter may leave: those of the parameter itself."""
        return {forward_type(strategy.outputs[0]) for strategy in self.options_of[self.key[parameter]]}
