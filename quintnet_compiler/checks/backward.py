"""Check of a differentiated graph against the typed program that it was made from.

Forward, each operator and conversion must be there, reading what it should. Backward, the gradient of every value must
be the sum of one term per use, each the derivative of its operator (see :mod:`.derivatives`) or the transpose
that its conversion's types prescribe (:mod:`.tables`); nothing more, nothing less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..core.annotations import Leaf, is_getitem, leaf, needs_grad, origin, tensor_inputs, value, values
from ..ir.program import DifferentiatedProgram, outputs
from ..ops.catalog import op_spec
from ..ops.derivatives.user_derivatives import (
    arrives,
    derivatives,
    of_tangents,
)
from ..ops.rank_local import loss_scale
from .derivatives.calls import Pattern
from .expected_calls import ExpectedCalls, differentiable_results, literals
from .failure import check_failure

_fail = partial(check_failure, "backward check")
aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass
class Term:
    """A term that a gradient must have.

    Attributes:
        node: the node of a pattern that computes it.
        bindings: for nodes of the pattern, the nodes of the checked graph that they stand for.
        user: the operator that the term comes from.
    """

    node: fx.Node
    bindings: dict[fx.Node, fx.Node]
    user: fx.Node


def check_backward(
    program: DifferentiatedProgram,
    training: bool = True,
    templates: Mapping[Hashable, Any] | None = None,
    proven: set[Hashable] | None = None,
) -> None:
    """Check the forward of a program, and its backward if it is for training.

    Args:
        program: the differentiated program.
        training: whether it has a backward.
        templates: operators that were traced; each that the program has is proven before it is used.
        proven: smaller calls that were proven for other programs; those proven for this one are added.

    Raises:
        CompileError: QN209 with the operator whose forward or backward is not what it should be.
    """
    _BackwardCheck(program, training, ExpectedCalls(program.local, templates or {}, proven)).check_all()


class _BackwardCheck:
    """A check of one program.

    Attributes:
        terms: for each value and stage, the terms that its gradient must have.
    """

    def __init__(self, program: DifferentiatedProgram, training: bool, expected: ExpectedCalls) -> None:
        self.program, self.training, self.expected, self.local = program, training, expected, program.local
        self.user_derivatives = derivatives(self.local.graph)
        self.in_user_backward = of_tangents(self.local.graph.nodes)
        self.reached_by_loss = _reached_by_loss(self.local.graph)
        self.terms: dict[tuple[Value, int | None], list[Term]] = defaultdict(list)

    def check_all(self) -> None:
        """Check the forward, which collects the terms of gradients; then each gradient."""
        for copy, original in self.program.copies.items():
            self._check_copy(copy, original)
        for node in self.local.graph.nodes:
            if node.op == "call_function" and not is_getitem(node):
                self._check_operator(node)
        if self.training:
            self._add_loss_gradient(outputs(self.local.graph)[0])
            self._check_parameter_gradients()
            self._check_inner_gradients()
            self._check_no_other_gradients()

    def _leaf(self, key: Value) -> Leaf | None:
        """Return the parameter of a gradient; types say how it is scattered at the end of the step."""
        return leaf(self.local.deferred.get(key[0], key[0]))

    def _value(self, key: Value) -> fx.Node:
        node = self.program.values.get(key)
        if node is None:
            raise _fail(f"the differentiated graph has no value for {key[0].name}", key[0])
        return self._original(node)

    def _original(self, node: fx.Node) -> fx.Node:
        return self.program.copies.get(node, node)

    def _check_copy(self, copy: fx.Node, original: fx.Node) -> None:
        same_call = copy.target is original.target and literals(copy) == literals(original)
        pairs = zip(tensor_inputs(copy), tensor_inputs(original), strict=False)
        if not same_call or any(self._original(a) is not self._original(b) for a, b in pairs):
            raise _fail(f"{copy.name} is not {original.name} computed again", copy)

    # -- operators

    def _check_operator(self, node: fx.Node) -> None:
        """Check what ``node`` computes, and add the terms of its inputs' gradients."""
        if op_spec(node).user_derivative is not None:
            self._check_user_derivative(node)
            return
        keys = [(node, i) for i in range(len(values(node)))]
        results = [self.program.values.get(key) for key in keys]
        cotangents = [self.program.cotangents.get(key) for key in keys]
        if all(x is None for x in (*results, *cotangents)):
            return  # nothing reads it
        inputs = self._inputs(node, has_results=any(result is not None for result in results))
        self._check_shapes(node, cotangents)
        needs_backward = self._needs_backward(node)
        tangents = [None if x is None else value(x) for x in cotangents]
        pattern = self.expected.pattern(node, inputs, tangents, needs_backward)
        bindings = dict(zip(pattern.inputs, inputs, strict=True))
        self._check_results(node, pattern, bindings, results)
        if needs_backward and any(x is not None for x in cotangents):
            self._add_terms(node, pattern, bindings, cotangents)

    def _needs_backward(self, node: fx.Node) -> bool:
        """Return whether a gradient may flow through ``node``: none flows through what a user's backward computes."""
        return self.training and needs_grad(node) and node not in self.in_user_backward

    def _check_results(
        self, node: fx.Node, pattern: Pattern, bindings: dict[fx.Node, fx.Node], results: Sequence[fx.Node | None]
    ) -> None:
        pairs = [(a, b) for a, b in zip(pattern.outputs, results, strict=False) if a is not None and b is not None]
        for expected, result in pairs:
            if not self._matches(expected, result, bindings, self.local.stage.get(node)):
                raise _fail(f"{result.name} is not what {node.name} should compute", node)

    def _inputs(self, node: fx.Node, *, has_results: bool) -> list[fx.Node]:
        """Return the nodes that ``node`` reads in the differentiated graph.

        If only its gradient is used, which a backward of the user's declares, the inputs may be missing.
        """
        sources = [origin(x) for x in tensor_inputs(node)]
        if has_results:
            return [self._value(source) for source in sources]
        pairs = zip(sources, tensor_inputs(node), strict=True)
        return [self._original(self.program.values.get(source, x)) for source, x in pairs]

    def _check_shapes(self, node: fx.Node, cotangents: Sequence[fx.Node | None]) -> None:
        for x, cotangent in zip(values(node), cotangents, strict=True):
            if cotangent is not None and value(cotangent).shape != x.shape:
                raise _fail(f"{cotangent.name}, the gradient of {node.name}, has another shape than its value", node)

    def _add_terms(
        self,
        node: fx.Node,
        pattern: Pattern,
        bindings: dict[fx.Node, fx.Node],
        cotangents: Sequence[fx.Node | None],
    ) -> None:
        for tangent, cotangent in zip(pattern.tangents, cotangents, strict=False):
            if tangent is not None and cotangent is not None:
                bindings[tangent] = cotangent
        for x, term in zip(tensor_inputs(node), pattern.gradients, strict=True):
            if term is not None:
                self.terms[origin(x), self.local.stage.get(node)].append(Term(term, bindings, node))

    # -- derivatives that users wrote

    def _check_user_derivative(self, node: fx.Node) -> None:
        """Check an end of a derivative that the user wrote: it passes on values and gradients unchanged."""
        source = origin(tensor_inputs(node)[0])
        if op_spec(node).user_derivative == "declaration":
            self._add_declared_gradient(node, source)
            return
        self._check_passed_on(node, source)
        cotangent = self.program.cotangents.get((node, 0))
        if op_spec(node).user_derivative == "tangent":
            self._check_tangent(node, cotangent)
        elif self.training and cotangent is not None:
            self._add_gradient(source, cotangent, node)

    def _add_declared_gradient(self, node: fx.Node, source: Value) -> None:
        declared = tensor_inputs(node)[1]
        gradient = self.program.values.get(origin(declared))
        if gradient is None or not self.training or not needs_grad(node):
            return
        if declared in self.in_user_backward or self._is_reached(node):
            self._add_gradient(source, gradient, node)

    def _is_reached(self, node: fx.Node) -> bool:
        """Return whether a gradient of the loss reaches the user's derivative that ``node`` belongs to."""
        derivative = self.user_derivatives[node]
        return any(x in self.reached_by_loss for x, d in self.user_derivatives.items() if d is derivative)

    def _check_passed_on(self, node: fx.Node, source: Value) -> None:
        result = self.program.values.get((node, 0))
        if result is None:
            return
        passed = result if op_spec(node).user_derivative == "tangent" else result.args[0]
        is_alias = passed is result or op_spec(result).aliases
        if not is_alias or not isinstance(passed, fx.Node) or self._original(passed) is not self._value(source):
            raise _fail(f"{result.name} is not what {node.name} passes on", node)

    def _check_tangent(self, node: fx.Node, cotangent: fx.Node | None) -> None:
        tangent = self.program.values.get((node, 1))
        if tangent is None or tangent is cotangent:
            return
        if cotangent is not None or tangent.target is not aten.zeros.default:
            raise _fail(f"{tangent.name} is not the gradient of {node.name}", node)

    def _add_gradient(self, key: Value, gradient: fx.Node, node: fx.Node) -> None:
        stand_in = self.expected.scratch.placeholder("t", value(gradient))
        self.terms[key, self.local.stage.get(node)].append(Term(stand_in, {stand_in: gradient}, node))

    # -- gradients

    def _add_loss_gradient(self, loss: fx.Node) -> None:
        x, scratch = values(loss)[0], self.expected.scratch
        gradient = scratch.call(aten.ones.default, list(x.shape), dtype=x.dtype, device=x.device)
        if self.local.staged.sharded.program.precision.scale is not None:
            gradient = scratch.call(loss_scale, gradient)
        key = origin(loss)
        self.terms[key, self.local.stage.get(key[0], 0)].append(Term(gradient, {}, key[0]))

    def _check_parameter_gradients(self) -> None:
        for (key, stage), terms in self.terms.items():
            parameter = self._leaf(key)
            if parameter is not None:
                gradient = self.program.gradients.get((parameter.name, stage or 0))
                self._check_sum(gradient, terms, f"the gradient of {parameter.name} in stage {stage}", key[0], stage)

    def _check_inner_gradients(self) -> None:
        unread = self._unread_gradients()
        terms_of: dict[Value, list[Term]] = defaultdict(list)  # from all stages
        for (key, _), terms in self.terms.items():
            if self._leaf(key) is None and key not in unread:
                terms_of[key] += terms
        reaches_parameter: dict[Value, bool] = {}
        for key, terms in terms_of.items():
            if key in self.program.cotangents or self._reaches_parameter(key, reaches_parameter):
                self._check_sum(self.program.cotangents.get(key), terms, f"the gradient of {key[0].name}", key[0], None)

    def _check_no_other_gradients(self) -> None:
        leaves = [(self._leaf(key), stage) for key, stage in self.terms]
        used = {(parameter.name, stage) for parameter, stage in leaves if parameter is not None}
        for name, stage in self.program.gradients:
            if (name, stage) not in used:
                raise _fail(f"{name} gets a gradient in stage {stage}, where nothing uses it")

    def _unread_gradients(self) -> frozenset[Value]:
        """Return the values whose gradients only a backward of the user's could read, and does not."""
        read = set[Value]()
        for node in self.local.graph.nodes:
            if is_getitem(node) or node.op == "output" or not needs_grad(node):
                continue
            if op_spec(node).user_derivative == "tangent":
                is_read = (node, 1) in self.program.values
            else:
                is_read = node.op == "placeholder" or any(origin(x) in read for x in arrives(node))
            if is_read:
                read |= {(node, i) for i in range(len(values(node)))}
        return frozenset(key for key, _ in self.terms if key not in read)

    def _reaches_parameter(self, key: Value, answers: dict[Value, bool]) -> bool:
        """Return whether a parameter's gradient depends on that of ``key``: some derivatives are always 0."""
        if key not in answers:
            answers[key] = self._gradient_is_passed_on(key, answers)
        return answers[key]

    def _gradient_is_passed_on(self, key: Value, answers: dict[Value, bool]) -> bool:
        node, index = key
        if not needs_grad(node):
            return False
        sources = [origin(x) for x in tensor_inputs(node)]
        if op_spec(node).converts:
            return self._reaches_parameter(sources[0], answers)
        if node.op == "placeholder" or node in self.user_derivatives:
            return True
        differentiable = differentiable_results(node)
        tangents = [x if i in differentiable else None for i, x in enumerate(values(node))]
        pattern = self.expected.pattern(node, [self._value(source) for source in sources], tangents, True)
        return any(
            term is not None and self._reaches_parameter(source, answers) and _depends(term, pattern.tangents[index])
            for source, term in zip(sources, pattern.gradients, strict=True)
        )

    def _check_sum(
        self, total: fx.Node | None, terms: Sequence[Term], name: str, node: fx.Node, stage: int | None
    ) -> None:
        """Check that ``total`` adds up exactly ``terms``.

        Each term is computed in the stage of its operator, and added there to the other terms of that stage.
        """
        if total is None:
            raise _fail(f"{name} is missing", node)
        unmatched, crossing = list(terms), set[int | None]()
        pending = [(total, self.program.stage.get(total))]
        while pending:
            addend, reader_stage = pending.pop()
            term = self._take_term(unmatched, addend)
            # a gradient that an operator passes on unchanged is in the stage that it came from
            addend_stage = self.program.stage.get(addend) if term is None else self.local.stage.get(term.user)
            if addend is total and stage not in (None, addend_stage):
                raise _fail(f"{name} is added up in stage {addend_stage}", node)
            if addend_stage != reader_stage:
                if addend_stage in crossing:
                    raise _fail(f"{name} leaves stage {addend_stage} in several tensors", node)
                crossing.add(addend_stage)
            if term is None:
                pending += [(operand, addend_stage) for operand in _addends(addend, name, node)]
        if unmatched:
            users = ", ".join(term.user.name for term in unmatched)
            raise _fail(f"{name} lacks the term of {users}", node)

    def _take_term(self, terms: list[Term], node: fx.Node) -> Term | None:
        """Remove the term that ``node`` computes from ``terms``, and return it."""
        for index, term in enumerate(terms):
            if self._matches(term.node, node, dict(term.bindings), self.local.stage.get(term.user)):
                return terms.pop(index)
        return None

    # -- comparing graphs

    def _matches(self, pattern: fx.Node, node: fx.Node, bindings: dict[fx.Node, fx.Node], stage: int | None) -> bool:
        """Return whether ``node`` computes ``pattern`` in ``stage``, and add the matched nodes to ``bindings``."""
        pending = [(pattern, node)]
        while pending:
            expected, actual = pending.pop()
            if expected in bindings:
                if not self._is_same_value(bindings[expected], actual):
                    return False
                continue
            while op_spec(actual).relayouts and expected.target is not actual.target:
                (actual,) = actual.all_input_nodes
            in_stage = stage is None or self.program.stage.get(actual, stage) == stage
            if not in_stage or not _is_same_call(expected, actual):
                return False
            bindings[expected] = self._original(actual)
            pending += zip(tensor_inputs(expected), tensor_inputs(actual), strict=True)
        return True

    def _is_same_value(self, expected: fx.Node, actual: fx.Node) -> bool:
        """Return whether two nodes are one value, in any memory format."""
        expected, actual = self._original(expected), self._original(actual)
        while actual is not expected and op_spec(actual).relayouts:
            actual = self._original(actual.all_input_nodes[0])
        return actual is expected


def _addends(node: fx.Node, name: str, user: fx.Node) -> list[fx.Node]:
    if not op_spec(node).adds or len(node.args) != 2 or len(node.all_input_nodes) not in (1, 2):
        raise _fail(f"{name} adds {node.name}, which is none of its terms", user)
    return list(node.args)  # type: ignore[arg-type]


def _is_same_call(expected: fx.Node, actual: fx.Node) -> bool:
    """Return whether two nodes call one operator on shapes and literals that are equal."""
    if expected.op != "call_function" or actual.op != "call_function" or expected.target is not actual.target:
        return False
    return _shapes(expected) == _shapes(actual) and literals(expected) == literals(actual)


def _shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    return [None if x is None else tuple(x.shape) for x in values(node)]


def _reached_by_loss(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the operators that a gradient of the loss reaches."""
    reached = {outputs(graph)[0]}
    for node in reversed(graph.nodes):
        if node in reached and node.op == "call_function":
            reached.update(x for x in tensor_inputs(node) if needs_grad(x))
    return frozenset(reached)


def _depends(node: fx.Node, source: fx.Node | None) -> bool:
    """Return whether ``node`` is computed from ``source``."""
    seen, pending = set[fx.Node](), [node]
    while pending:
        ancestor = pending.pop()
        if ancestor is source:
            return True
        pending += [x for x in ancestor.all_input_nodes if x not in seen]
        seen.update(ancestor.all_input_nodes)
    return False
