"""LocalProgram -> DifferentiatedProgram: the backward pass as nodes of the same graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...core.annotations import (
    annotate,
    copied_from,
    facts,
    is_getitem,
    leaf,
    needs_grad,
    origin,
    tensor_inputs,
    values,
)
from ...core.errors import CompileError, QuintNetError
from ...core.sharding import parse_type
from ...ir.builder import GraphBuilder
from ...ir.program import DifferentiatedProgram, LocalProgram, outputs
from ...ops.catalog import op_spec
from ...ops.derivatives.operator_trace import Template
from ...ops.derivatives.user_derivatives import (
    derivatives,
    is_tangent,
    of_tangents,
)
from ...strategies.emit_conversion import emit_conversion, emit_conversion_backward, loss_seed, parameter_conversions
from .vector_jacobian import Pullback, VectorJacobian

aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Differentiate:
    """Append the backward of every operator that a gradient reaches.

    Before: %y = linear(%x, %w);  return %loss
    After:  %y = linear(%x, %w);  ...;  %gx = mm(%gy, %w);  %gw = mm(t(%gy), %x);  return %loss, %gw
    Ensures: typed conversions are collectives, transposed in the backward; each backward node has the stage and the
    source line of the operator that it differentiates; gradients of one value are summed in the stage of its users
    first, so that one tensor per value crosses between two stages.

    ``training=False`` only lowers conversions. ``templates``: traces of operators, for all programs of one fake mode
    that this pass is applied to.
    """

    training: bool = True
    templates: dict[Hashable, Template] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, local: LocalProgram, /) -> DifferentiatedProgram:
        return _Tape(local, self.training, self.templates).differentiate()


class _Tape:
    """A program's forward, and the pullbacks of its operators.

    Attributes:
        deferring: conversions of parameters whose transposes run at the end of the step, on summed gradients.
        value: the node of each output of an operator.
        pullbacks: operators that a gradient may reach, in order, each with its pullback.
        arrived: of each value, by the stage of its users, the sum of its gradients so far.
        gradients: by parameter and stage, its gradient.
        cotangents: the total gradient of each value.
        multiple_outputs: operators of a user's backward that have several outputs.
        user_backward: the nodes of all user's backwards.
    """

    def __init__(self, local: LocalProgram, training: bool, templates: dict[Hashable, Template]) -> None:
        self.local, self.training = local, training
        self.precision, self.parameters = local.staged.sharded.program.precision, parameter_conversions(local)
        self.deferring = _deferred_conversions(local)
        self.builder = GraphBuilder(local.mode)
        self.operators = VectorJacobian(self.builder, templates, absent=local.staged.sharded.program.absent)
        self.value: dict[Value, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.once: set[fx.Node] = set()
        self.again: set[fx.Node] = set()
        self.pullbacks: list[tuple[fx.Node, Pullback]] = []
        self.arrived: dict[Value, dict[int, fx.Node]] = defaultdict(dict)
        self.gradients: dict[tuple[str, int], fx.Node] = {}
        self.cotangents: dict[Value, fx.Node] = {}
        self.multiple_outputs: dict[fx.Node, fx.Node] = {}
        self.user_backward, self.derivatives = of_tangents(local.graph.nodes), derivatives(local.graph)

    def differentiate(self) -> DifferentiatedProgram:
        for node in self.local.graph.nodes:
            if node.op != "output" and not is_getitem(node):
                self._forward(node)
        results = tuple(self.value[origin(n)] for n in outputs(self.local.graph))
        if self.training:
            self._backward(outputs(self.local.graph)[0])
        ordered = sorted(self.gradients.items(), key=lambda item: item[0])
        self.builder.output((*results, *(node for _, node in ordered)))
        _drop_unused(self.builder.graph)
        alive = set(self.builder.graph.nodes)
        return DifferentiatedProgram(
            self.local,
            self.builder.graph,
            results,
            {n: s for n, s in self.stage.items() if n in alive},
            frozenset(self.once & alive),
            dict(ordered),
            {key: n for key, n in self.value.items() if n in alive},
            {key: n for key, n in self.cotangents.items() if n in alive},
            again=frozenset(self.again & alive),
        )

    # -- forward

    def _applied(self, node: fx.Node, args: Any, kwargs: Any, differentiable: list[int]) -> tuple[list[Any], Pullback]:
        try:
            return self.operators.apply(node.target, args, kwargs, differentiable, self._sum_dtype(node))
        except CompileError as error:
            raise CompileError(
                error.code, error.message, where=error.where or facts(node).where, fix=error.fix
            ) from error
        except QuintNetError:
            raise
        except Exception as error:  # PyTorch's derivatives raise errors of many kinds
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            message = f"the derivative of {node.target} cannot be traced: {text}"
            raise CompileError("QN109", message, where=facts(node).where) from error

    def _sum_dtype(self, node: fx.Node) -> torch.dtype | None:
        """Return the dtype in which the gradient of a lookup's table is summed, if it is not that of its rows.

        Of a copy of a parameter it is the parameter's own, as if rows were cast after the lookup.
        """
        if not op_spec(node).looks_up:
            return None
        table = tensor_inputs(node)[0]
        stored = self.parameters.get(table) or copied_from(table)
        stored_leaf = None if stored is None else leaf(stored)
        return None if stored_leaf is None else stored_leaf.held

    def _forward(self, node: fx.Node) -> None:
        """Emit a node of the forward, and add its pullback."""
        if node.op == "placeholder":
            self._leaf(node)
        elif op_spec(node).user_derivative == "declaration":
            if self._differentiates(node):
                self.pullbacks.append((node, lambda _: [self._declared(node), None]))
        elif node in self.user_backward:
            pass  # emitted when the backward reaches it
        elif op_spec(node).user_derivative == "tangent":
            self.value[node, 0] = self.value[origin(node.args[0])]  # type: ignore[arg-type]
        else:
            first_new = len(self.builder.made)
            self._enter(node)
            with self.builder.at(node):
                self._operator(node)
            self._settle(node, first_new)

    def _leaf(self, node: fx.Node) -> None:
        node_facts = facts(node)
        new = self.builder.placeholder(node.name, values(node)[0], node_facts.leaf, needs_grad=node_facts.needs_grad)
        self.value[node, 0] = new
        if node in self.local.once:
            self.once.add(new)

    def _operator(self, node: fx.Node) -> None:
        """Emit an operator. If a gradient may reach it, add its pullback."""
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: self.value.get(origin(n)))
        args, kwargs = arguments
        differentiates = self._differentiates(node) and node not in self.deferring
        if op_spec(node).user_derivative == "end":
            self._after_gradients(node, args[0])
        elif op_spec(node).converts:
            self.value[node, 0] = self._convert(*args, stored=node in self.local.at_start)
            if differentiates:
                self.pullbacks.append((node, self._transpose(node)))
        elif differentiates:
            outputs_with_gradient = _outputs_with_gradient(node) if isinstance(facts(node).value, tuple) else [0]
            results, pullback = self._applied(node, args, kwargs, outputs_with_gradient)
            self.value |= {(node, index): result for index, result in enumerate(results) if result is not None}
            self.pullbacks.append((node, pullback))
        else:
            self._call(node, args, kwargs)

    def _differentiates(self, node: fx.Node) -> bool:
        return self.training and facts(node).needs_grad

    def _after_gradients(self, node: fx.Node, source: fx.Node) -> None:
        """Emit a value whose gradient goes on after those that the operator names."""
        alias = self.builder.call(aten.alias.default, source)
        self.value[node, 0] = annotate(alias, replace(facts(alias), needs_grad=facts(node).needs_grad))
        if self._differentiates(node):
            no_gradients = [None] * (len(tensor_inputs(node)) - 1)
            self.pullbacks.append((node, lambda tangents: [tangents[0], *no_gradients]))

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """Emit an operator that no gradient reaches, and those of its outputs that are read."""
        new = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        if not isinstance(facts(node).value, tuple):
            self.value[node, 0] = new
            return
        for user in node.users:
            index = int(user.args[1])  # type: ignore[arg-type]
            if (node, index) not in self.value:
                self.value[node, index] = self.builder.getitem(new, index)

    def _enter(self, node: fx.Node) -> None:
        """Share equal calls within a stage, among nodes that run once, and among nodes of no stage."""
        self.builder.scope = self.local.stage.get(node, "once" if node in self.local.once else "anywhere")

    def _settle(self, node: fx.Node, first_new: int) -> None:
        """Give the new nodes the stage of ``node``, and run them as often."""
        stage = self.local.stage.get(node)
        for new in self.builder.made[first_new:]:
            if stage is not None:
                self.stage[new] = stage
            if facts(new).phase == "forward":
                self.once |= {new} if node in self.local.once else set()
                self.again |= {new} if node in self.local.again else set()

    def _convert(self, x: Any, axis: Any, size: Any, source: Any, target: Any, *, stored: bool) -> fx.Node:
        a, b = parse_type(source), parse_type(target)
        return emit_conversion(self.builder, x, axis, size, a, b, self.precision, stored=stored)

    def _transpose(self, node: fx.Node) -> Pullback:
        source, target = (parse_type(str(kind)) for kind in node.args[3:])

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            assert tangents[0] is not None
            parameter = self.parameters.get(node)
            x = tangents[0]
            return [emit_conversion_backward(self.builder, x, node, source, target, parameter, self.precision)]

        return pullback

    # -- backward

    def _backward(self, loss: fx.Node) -> None:
        """Emit the backward of ``loss``: run pullbacks in reverse order."""
        source, index = origin(loss)
        first_new = len(self.builder.made)
        self._enter(source)
        with self.builder.at(source, backward=True):
            seed = loss_seed(self.builder, values(loss)[0], self.precision)
        self._settle(source, first_new)
        stage = self.local.stage.get(source, 0)
        self.arrived[source, index][stage] = seed
        first_users = _first_users(self.local)
        for node, pullback in reversed(self.pullbacks):
            stage = self.local.stage[node]
            with self.builder.at(node, backward=True):
                tangents = [self._sum((node, i), stage) for i in range(len(values(node)))]
                first_new = len(self.builder.made)
                self._enter(node)
                if op_spec(node).user_derivative == "declaration" or any(t is not None for t in tangents):
                    terms = pullback(tangents)
                    for operand, term in zip(tensor_inputs(node), terms, strict=True):
                        if term is not None:
                            self._arrive(origin(operand), stage, term)
                self._settle(node, first_new)
                for parameter in first_users.get((node, stage), ()):
                    total = self.arrived[parameter, 0].pop(stage, None)
                    if total is not None:
                        parameter_leaf = leaf(self.local.deferred.get(parameter, parameter))
                        assert parameter_leaf is not None
                        self.gradients[parameter_leaf.name, stage] = total

    def _declared(self, node: fx.Node) -> fx.Node | None:
        """Return the gradient that the user's backward computes; None if no gradient has arrived."""
        derivative, stage = self.derivatives[node], self.local.stage[node]
        ends = [n for n, d in self.derivatives.items() if d is derivative and op_spec(n).user_derivative == "tangent"]
        for end in ends:
            self._sum((end, 0), stage)
        if not any((end, 0) in self.cotangents for end in ends):
            return None
        gradient = tensor_inputs(node)[1]
        needed = self._needed_of_user_backward(gradient)
        for step in self.local.graph.nodes:
            if step in needed and origin(step) not in self.value and step not in self.multiple_outputs:
                with self.builder.at(step, backward=True):
                    self._user_backward_step(step)
        return self.value[origin(gradient)]

    def _needed_of_user_backward(self, gradient: fx.Node) -> set[fx.Node]:
        """Return the nodes of a user's backward that ``gradient`` is computed from."""
        needed, todo = set[fx.Node](), [gradient]
        while todo:
            node = todo.pop()
            if node in self.user_backward and node not in needed:
                needed.add(node)
                todo += node.all_input_nodes if not is_tangent(node) else []
        return needed

    def _tangent(self, node: fx.Node) -> fx.Node:
        """Return the gradient that a user's backward starts from: zeros, if none has arrived.

        Raises:
            CompileError: if the backward would be given None.
        """
        arrived = self.cotangents.get((origin(node)[0], 0))
        if arrived is not None:
            return arrived
        if not origin(node)[0].args[1]:
            raise CompileError(
                "QN105",
                "an output of a torch.autograd.Function gets no gradient, and its backward would be given None "
                "(set_materialize_grads(False))",
                where=facts(node).where,
                fix="take set_materialize_grads(False) away, so that it is given zeros",
            )
        like = values(node)[0]
        return self.builder.call(aten.zeros.default, list(like.shape), dtype=like.dtype, device=like.device)

    def _user_backward_step(self, node: fx.Node) -> None:
        """Emit one node of the user's backward."""
        if is_tangent(node):
            self.value[origin(node)] = self._tangent(node)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value.get(origin(n)))
        if op_spec(node).converts:
            self.value[node, 0] = self._convert(*args, stored=False)
        elif is_getitem(node):
            source, index = origin(node)
            self.value[source, index] = self.builder.getitem(self.multiple_outputs[source], index)
        else:
            result = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            if isinstance(facts(node).value, tuple):
                self.multiple_outputs[node] = result
            else:
                self.value[node, 0] = result

    def _sum(self, value: Value, stage: int) -> fx.Node | None:
        """Return the gradient of ``value``: the sum over stages of their sums, added up in ``stage``."""
        sums = [total for _, total in sorted(self.arrived.pop(value, {}).items(), reverse=True)]
        first_new = len(self.builder.made)
        self.builder.scope = stage
        total = self._add(sums) if sums else None
        for new in self.builder.made[first_new:]:
            self.stage[new] = stage
        if total is not None:
            self.cotangents[value] = total
        return total

    def _arrive(self, value: Value, stage: int, term: fx.Node) -> None:
        """Add a gradient of ``value`` to the sum of its stage at once, so that memory holds at most two terms."""
        partial = self.arrived[value].get(stage)
        self.arrived[value][stage] = term if partial is None else self._add([partial, term])

    def _add(self, terms: list[fx.Node]) -> fx.Node:
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.call(aten.add.Tensor, total, term)
        return total


def _outputs_with_gradient(node: fx.Node) -> list[int]:
    """Return the outputs of an operator that a gradient may reach."""
    return sorted({origin(user)[1] for user in node.users if is_getitem(user) and needs_grad(user)})


def _first_users(local: LocalProgram) -> dict[tuple[fx.Node, int], list[fx.Node]]:
    """Return, by operator and stage, the parameters whose first user in that stage the operator is.

    It is the last to send their gradient. Parameters are trainable leaves, or the gathered values that stand for them
    until the end of the step.
    """
    first_users: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
    seen: set[tuple[fx.Node, int]] = set()
    deferring = _deferred_conversions(local)
    for node in local.graph.nodes:
        stage = local.stage.get(node)
        if node.op != "call_function" or not needs_grad(node) or node in deferring or stage is None:
            continue
        for source in tensor_inputs(node):
            stored = leaf(source) is not None or source in local.deferred
            if stored and needs_grad(source) and (source, stage) not in seen:
                seen.add((source, stage))
                first_users[node, stage].append(source)
    return first_users


def _deferred_conversions(local: LocalProgram) -> frozenset[fx.Node]:
    """Return the conversions and copies of parameters whose transposes run at the end of the step."""
    conversions: set[fx.Node] = set()
    for node, stored in local.deferred.items():
        while node is not stored:
            conversions.add(node)
            (node,) = node.all_input_nodes
    return frozenset(conversions)


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
