"""What a differentiated graph must compute for each operator of the typed program, as small graphs to compare with."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core.annotations import copied_from, facts, is_getitem, leaf, needs_grad, origin, tensor_inputs, value, values
from ..core.sharding import parse_type
from ..ir.builder import GraphBuilder
from ..ir.program import LocalProgram
from ..ops.catalog import op_spec
from .derivatives.calls import OperatorCall, Pattern
from .derivatives.proven import Derivatives
from .tables import SUMS, backward_call, dtype_of_sum, dtypes_of_gradient, forward_call

aten = torch.ops.aten


class ExpectedCalls:
    """Patterns of the operators and conversions of a program, each built and proven once.

    Attributes:
        scratch: builds the patterns; its placeholders have fake values.
    """

    def __init__(
        self, local: LocalProgram, templates: Mapping[Hashable, Any], proven: set[Hashable] | None = None
    ) -> None:
        """Start with the traced ``templates``, and with the smaller calls that were ``proven`` for other programs."""
        program = local.staged.sharded.program
        self.scratch = GraphBuilder(local.mode)
        self._precision, self._at_start = program.precision, local.at_start
        self._derivatives = Derivatives(self.scratch, dict(templates), program.absent, proven)
        self._patterns: dict[Hashable, Pattern] = {}

    def pattern(
        self, node: fx.Node, inputs: Sequence[fx.Node], cotangents: Sequence[Tensor | None], needs_backward: bool
    ) -> Pattern:
        """Return the forward of ``node``, and its backward if it ``needs_backward``.

        Args:
            node: an operator or a conversion of the local program.
            inputs: the nodes of the differentiated graph that it reads.
            cotangents: a fake tensor for each of its results that has a gradient.
            needs_backward: whether its inputs get gradients.

        Raises:
            CompileError: QN209 if the template of the operator is not its derivative.
        """
        parameter = moved_parameter(node)
        key = (
            node.target,
            literals(node),
            tuple((*_layout(value(x)), needs_grad(x), inputs.index(x)) for x in inputs),
            tuple(None if x is None else _layout(x) for x in cotangents),
            needs_backward,
            tuple(differentiable_results(node)),
            node in self._at_start,
            None if parameter is None else value(parameter).dtype,
            _dtype_of_summed_rows(node),
        )
        if key not in self._patterns:
            self._patterns[key] = self._build(node, inputs, cotangents, needs_backward)
        return self._patterns[key]

    def _build(
        self, node: fx.Node, inputs: Sequence[fx.Node], cotangents: Sequence[Tensor | None], needs_backward: bool
    ) -> Pattern:
        if op_spec(node).converts:
            return self._conversion(node, inputs, cotangents)
        if not needs_backward:
            return self._forward(node, inputs, cotangents)
        return self._derivatives.pattern(
            OperatorCall(
                node.target,
                (node.args, node.kwargs),
                tuple(value(x) for x in inputs),
                tuple(needs_grad(x) for x in inputs),
                tuple(inputs.index(x) for x in inputs),
                tuple(cotangents),
                tuple(differentiable_results(node)),
                _dtype_of_summed_rows(node),
            )
        )

    def _forward(self, node: fx.Node, inputs: Sequence[fx.Node], cotangents: Sequence[Tensor | None]) -> Pattern:
        operands, (args, kwargs) = self._operands(node, inputs)
        tangents = self._tangents(cotangents)
        call = self.scratch.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        several = isinstance(facts(call).value, tuple)
        results = [self.scratch.getitem(call, i) for i in range(len(values(node)))] if several else [call]
        return Pattern(operands, tangents, tuple(results), (None,) * len(operands))

    def _operands(self, node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], Any]:
        """Return a placeholder for each input, the same for equal inputs, and the arguments with them."""
        stand_ins = {x: self.scratch.placeholder("x", value(x), needs_grad=needs_grad(x)) for x in inputs}
        operands = tuple(stand_ins[x] for x in inputs)
        following = iter(operands)
        return operands, fx.map_arg((node.args, node.kwargs), lambda _: next(following))

    def _tangents(self, cotangents: Sequence[Tensor | None]) -> tuple[fx.Node | None, ...]:
        return tuple(None if x is None else self.scratch.placeholder("t", x) for x in cotangents)

    # -- conversions

    def _conversion(self, node: fx.Node, inputs: Sequence[fx.Node], cotangents: Sequence[Tensor | None]) -> Pattern:
        """Return the collectives of a conversion.

        Values are added up in their dtype; gradients of parameters in the dtype of the sum, in which they stay.
        """
        (x,), (args, _) = self._operands(node, inputs)
        (tangent,) = self._tangents(cotangents)
        _, axis, size, source, target = args
        source_type, target_type = parse_type(source), parse_type(target)
        result, gradient = x, tangent
        forward = forward_call(source_type, target_type, stored=node in self._at_start)
        if forward is not None:
            dtype = value(x).dtype
            result = self._collective(x, forward, axis, size, dtype_of_sum(self._precision, dtype))
            result = self._cast(result, dtype)
        backward = backward_call(source_type, target_type)
        if tangent is not None and backward is not None:
            gradient = self._gradient(node, tangent, backward, axis, size)
        return Pattern((x,), (tangent,), (result,), (gradient,))

    def _gradient(self, node: fx.Node, tangent: fx.Node, backward: Any, axis: str, size: int) -> fx.Node:
        dtype, parameter = value(tangent).dtype, moved_parameter(node)
        if parameter is not None:
            dtype_of_terms = dtypes_of_gradient(self._precision, value(parameter).dtype)[1]
            return self._collective(tangent, backward, axis, size, dtype_of_terms)
        gradient = self._collective(tangent, backward, axis, size, dtype_of_sum(self._precision, dtype))
        return self._cast(gradient, dtype)

    def _collective(self, x: fx.Node, call: Any, axis: str, size: int, dtype_of_terms: torch.dtype) -> fx.Node:
        """Call a collective on ``x``, in ``dtype_of_terms`` if it adds up."""
        operator, dims = call
        return self.scratch.call(operator, self._cast(x, dtype_of_terms) if operator in SUMS else x, axis, size, *dims)

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype is dtype else self.scratch.call(aten._to_copy.default, x, dtype=dtype)


def literals(node: fx.Node) -> str:
    """Return the arguments of a node that are not nodes, as text."""
    return repr(fx.map_arg((node.args, node.kwargs), lambda _: "*"))


def differentiable_results(node: fx.Node) -> list[int]:
    """Return the indices of the results of an operator that a gradient may reach."""
    if not isinstance(facts(node).value, tuple):
        return [0]
    return sorted({origin(user)[1] for user in node.users if is_getitem(user) and needs_grad(user)})


def moved_parameter(node: fx.Node) -> fx.Node | None:
    """Return the parameter that a conversion moves, also through other conversions or as a copy."""
    if not op_spec(node).converts:
        return None
    source = _before_conversions(node)
    source = copied_from(source) or source
    source_leaf = leaf(source)
    return source if source_leaf is not None and source_leaf.kind == "parameter" else None


def _dtype_of_summed_rows(node: fx.Node) -> torch.dtype | None:
    """Return the dtype in which a lookup in a copy of a parameter adds up rows of its gradient: the parameter's."""
    if not op_spec(node).looks_up:
        return None
    parameter = copied_from(_before_conversions(tensor_inputs(node)[0]))
    return None if parameter is None else value(parameter).dtype


def _before_conversions(node: fx.Node) -> fx.Node:
    source = node
    while op_spec(source).converts:
        (source,) = source.all_input_nodes
    return source


def _layout(x: Tensor) -> tuple[Hashable, ...]:
    return tuple(x.shape), x.stride(), x.dtype
