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
from ...ops.collectives import convert
from ...ops.derivatives.user_derivatives import (
    after_gradients,
    declare_gradient,
    derivatives,
    is_tangent,
    of_tangents,
    with_tangent,
)
from ...ops.rank_local import LOOKUPS
from ..lowering.reductions import emit_conversion, emit_conversion_backward, loss_seed, parameter_conversions
from .operator_trace import Template
from .vector_jacobian import Pullback, VectorJacobian

aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Differentiate:
    """Append the backward of every operator that a gradient reaches.

    Before: %y = linear(%x, %w);  return %loss
    After:  %y = linear(%x, %w);  ...;  %gx = mm(%gy, %w);  %gw = mm(t(%gy), %x);  return %loss, %gw
    Ensures: typed conversions are plain communication, transposed in the backward; each backward node has the stage
    and the source line of the operator that it differentiates; gradients of one value are added up in the stage
    that produced them first, so that one tensor crosses per value and stage.

    ``training=False`` only lowers conversions. ``templates``: operators that were traced once, for all programs of
    one fake mode that this pass is applied to.
    """

    training: bool = True
    templates: dict[Hashable, Template] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, local: LocalProgram, /) -> DifferentiatedProgram:
        return _Tape(local, self.training, self.templates).run()


class _Tape:
    def __init__(self, local: LocalProgram, training: bool, templates: dict[Hashable, Template]) -> None:
        self.local, self.training = local, training
        self.precision, self.parameters = local.staged.sharded.program.precision, parameter_conversions(local)
        self.deferring = _between(local)  # their transposes stand at the end of the step, where gradients settle
        self.builder = GraphBuilder(local.mode)
        self.operators = VectorJacobian(self.builder, templates, absent=local.staged.sharded.program.absent)
        self.value: dict[Value, fx.Node] = {}
        self.stage: dict[fx.Node, int] = {}
        self.once: set[fx.Node] = set()
        self.again: set[fx.Node] = set()
        self.pullbacks: list[tuple[fx.Node, Pullback]] = []
        # gradients that arrived: value -> stage of the user -> their sum
        self.arrived: dict[Value, dict[int, fx.Node]] = defaultdict(dict)
        self.gradients: dict[tuple[str, int], fx.Node] = {}
        self.cotangents: dict[Value, fx.Node] = {}
        self.several: dict[fx.Node, fx.Node] = {}  # operators of a user's backward that have several outputs
        self.later, self.derivatives = of_tangents(local.graph.nodes), derivatives(local.graph)

    def run(self) -> DifferentiatedProgram:
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

    def _applied(self, node: fx.Node, args: Any, kwargs: Any, wanted: list[int]) -> tuple[list[Any], Pullback]:
        try:
            return self.operators.apply(node.target, args, kwargs, wanted, self._sums(node))
        except QuintNetError:
            raise
        except Exception as error:  # of many kinds: what an operator's derivative computes is PyTorch's
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            message = f"the derivative of {node.target} cannot be traced: {text}"
            raise CompileError("QN109", message, where=facts(node).where) from error

    def _sums(self, node: fx.Node) -> torch.dtype | None:
        """Of a lookup in a copy of a parameter: the parameter's own dtype, as if rows were cast behind the lookup."""
        if node.target not in LOOKUPS:
            return None
        table = tensor_inputs(node)[0]
        start = self.parameters.get(table) or copied_from(table)
        found = None if start is None else leaf(start)
        return None if found is None else found.held

    def _forward(self, node: fx.Node) -> None:
        known = facts(node)
        if node.op == "placeholder":
            new = self.builder.placeholder(node.name, values(node)[0], known.leaf, needs_grad=known.needs_grad)
            self.value[node, 0] = new
            if node in self.local.once:
                self.once.add(new)
            return
        if node.target is declare_gradient and self.training and known.needs_grad:
            self.pullbacks.append((node, lambda _: [self._declared(node), None]))
        if node in self.later or node.target is declare_gradient:
            return
        if node.target is with_tangent:
            self.value[node, 0] = self.value[origin(node.args[0])]  # type: ignore[arg-type]
            return
        before = len(self.builder.made)
        self._enter(node)
        with self.builder.at(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value.get(origin(n)))
            if node.target is after_gradients:
                alias = self.builder.call(aten.alias.default, args[0])
                self.value[node, 0] = annotate(alias, replace(facts(alias), needs_grad=known.needs_grad))
                if self.training and known.needs_grad:
                    none = [None] * (len(tensor_inputs(node)) - 1)
                    self.pullbacks.append((node, lambda tangents: [tangents[0], *none]))
            elif node.target is convert:
                self.value[node, 0] = self._convert(*args, stored=node in self.local.at_start)
            elif self.training and known.needs_grad and node not in self.deferring:
                wanted = [0] if not isinstance(known.value, tuple) else _wanted(node)
                results, pullback = self._applied(node, args, kwargs, wanted)
                for index, result in enumerate(results):
                    if result is not None:
                        self.value[node, index] = result
                self.pullbacks.append((node, pullback))
            else:
                new = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
                if isinstance(known.value, tuple):
                    for user in node.users:
                        index = int(user.args[1])  # type: ignore[arg-type]
                        if (node, index) not in self.value:
                            self.value[node, index] = self.builder.getitem(new, index)
                else:
                    self.value[node, 0] = new
        if node.target is convert and self.training and known.needs_grad and node not in self.deferring:
            self.pullbacks.append((node, self._transpose(node)))
        self._settle(node, before)

    def _enter(self, node: fx.Node) -> None:
        """Equal calls are one node within a stage, within what runs once, and within what runs anywhere."""
        self.builder.scope = self.local.stage.get(node, "once" if node in self.local.once else "anywhere")

    def _settle(self, node: fx.Node, before: int) -> None:
        stage = self.local.stage.get(node)
        for new in self.builder.made[before:]:
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
            return [
                emit_conversion_backward(self.builder, tangents[0], node, source, target, parameter, self.precision)
            ]

        return pullback

    # -- backward

    def _backward(self, loss: fx.Node) -> None:
        source, index = origin(loss)
        before = len(self.builder.made)
        self._enter(source)
        with self.builder.at(source, backward=True):
            x = values(loss)[0]
            seed = loss_seed(self.builder, x, self.precision)
        self._settle(source, before)
        stage = self.local.stage.get(source, 0)
        self.arrived[source, index][stage] = seed
        first_users = _first_users(self.local)
        for node, pullback in reversed(self.pullbacks):
            stage = self.local.stage[node]
            with self.builder.at(node, backward=True):
                tangents = [self._sum((node, i), stage) for i in range(len(values(node)))]
                before = len(self.builder.made)
                self._enter(node)
                if node.target is declare_gradient or any(t is not None for t in tangents):
                    terms = pullback(tangents)
                    for given, term in zip(tensor_inputs(node), terms, strict=True):
                        if term is not None:
                            self._arrive(origin(given), stage, term)
                self._settle(node, before)
                for parameter in first_users.get((node, stage), ()):
                    total = self.arrived[parameter, 0].pop(stage, None)
                    if total is not None:
                        found = leaf(self.local.deferred.get(parameter, parameter))
                        assert found is not None
                        self.gradients[found.name, stage] = total

    def _declared(self, node: fx.Node) -> fx.Node | None:
        """The gradient that the user's backward makes of those that arrived; None if there are none."""
        mine, stage = self.derivatives[node], self.local.stage[node]
        ends = [n for n, d in self.derivatives.items() if d is mine and n.target is with_tangent]
        for end in ends:
            self._sum((end, 0), stage)
        if not any((end, 0) in self.cotangents for end in ends):
            return None
        last = tensor_inputs(node)[1]
        wanted, todo = set[fx.Node](), [last]
        while todo:
            here = todo.pop()
            if here in self.later and here not in wanted:
                wanted.add(here)
                todo += here.all_input_nodes if not is_tangent(here) else []
        for here in self.local.graph.nodes:
            if here in wanted and origin(here) not in self.value and here not in self.several:
                with self.builder.at(here, backward=True):
                    self._later(here)
        return self.value[origin(last)]

    def _later(self, node: fx.Node) -> None:
        """One node of the user's backward."""
        if is_tangent(node):
            known, arrived = values(node)[0], self.cotangents.get((origin(node)[0], 0))
            if arrived is None:
                if not origin(node)[0].args[1]:
                    raise CompileError(
                        "QN105",
                        "an output of a torch.autograd.Function gets no gradient, and its backward would be given None "
                        "(set_materialize_grads(False))",
                        where=facts(node).where,
                        fix="take set_materialize_grads(False) away, so that it is given zeros",
                    )
                size = list(known.shape)
                arrived = self.builder.call(aten.zeros.default, size, dtype=known.dtype, device=known.device)
            self.value[origin(node)] = arrived
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value.get(origin(n)))
        if node.target is convert:
            self.value[node, 0] = self._convert(*args, stored=False)
        elif is_getitem(node):
            source, index = origin(node)
            self.value[source, index] = self.builder.getitem(self.several[source], index)
        else:
            made = self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
            if isinstance(facts(node).value, tuple):
                self.several[node] = made
            else:
                self.value[node, 0] = made

    def _sum(self, value: Value, stage: int) -> fx.Node | None:
        """All gradients of ``value``: added up where they arose, then at home in ``stage``."""
        sums = [total for _, total in sorted(self.arrived.pop(value, {}).items(), reverse=True)]
        before = len(self.builder.made)
        self.builder.scope = stage
        total = self._add(sums) if sums else None
        for new in self.builder.made[before:]:
            self.stage[new] = stage
        if total is not None:
            self.cotangents[value] = total
        return total

    def _arrive(self, value: Value, stage: int, term: fx.Node) -> None:
        """Added at once, so that no more than two terms are held."""
        before = self.arrived[value].get(stage)
        self.arrived[value][stage] = term if before is None else self._add([before, term])

    def _add(self, terms: list[fx.Node]) -> fx.Node:
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.call(aten.add.Tensor, total, term)
        return total


def _wanted(node: fx.Node) -> list[int]:
    """The outputs of an operator through which a gradient may come back."""
    return sorted({origin(user)[1] for user in node.users if is_getitem(user) and needs_grad(user)})


def _first_users(local: LocalProgram) -> dict[tuple[fx.Node, int], list[fx.Node]]:
    """(operator, stage) -> trainable leaves (or what they are gathered to, where they wait for the end of the step)
    whose first user in that stage it is: the last to send a gradient."""
    found: dict[tuple[fx.Node, int], list[fx.Node]] = defaultdict(list)
    seen: set[tuple[fx.Node, int]] = set()
    between = _between(local)
    for node in local.graph.nodes:
        if node.op != "call_function" or not needs_grad(node) or node in between:
            continue
        stage = local.stage.get(node)
        for source in tensor_inputs(node):
            held = leaf(source) is not None or source in local.deferred
            if stage is not None and held and needs_grad(source) and (source, stage) not in seen:
                seen.add((source, stage))
                found[node, stage].append(source)
    return found


def _between(local: LocalProgram) -> frozenset[fx.Node]:
    """The conversions and copies of parameters whose gradients wait for the end of the step."""
    found: set[fx.Node] = set()
    for node, start in local.deferred.items():
        while node is not start:
            found.add(node)
            (node,) = node.all_input_nodes
    return frozenset(found)


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
