"""Patterns of operators with their backward, each proven the first time that it is used."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ...compat.torch import schema_or_none
from ...core.absent_gpu import AbsentGpu
from ...core.annotations import value
from ...ir.builder import GraphBuilder
from ...passes.autodiff.vector_jacobian import VectorJacobian
from .calls import INVALID, OperatorCall, Pattern
from .numbers import check_numbers
from .of_ranks import check_ranked, check_sums, expected_gradients
from .operands import elements
from .smaller_calls import in_numbers, smaller

MAX_ELEMENTS = 1 << 13  # of all operands together; calls of more are made smaller
MAX_ELEMENTS_UNCHANGED = 1 << 22  # of calls that cannot be made smaller


class Derivatives:
    """Patterns of operators with their backward, in the graph of ``scratch``.

    Attributes:
        absent: the GPU that the program is compiled for, if this machine has none.
        proven: smaller calls whose trace was right, also in other programs.
        operators: traces operators, starting from ``templates``, which were traced already.
    """

    def __init__(
        self,
        scratch: GraphBuilder,
        templates: dict[Hashable, Any],
        absent: AbsentGpu | None = None,
        proven: set[Hashable] | None = None,
    ) -> None:
        self.absent, self.proven = absent, set[Hashable]() if proven is None else proven
        self.scratch, self.operators = scratch, VectorJacobian(scratch, templates, _has_dense_rows, absent)

    def pattern(self, call: OperatorCall) -> Pattern:
        """Return the pattern of ``call`` and its backward.

        Raises:
            CompileError: QN209 if its template is not the derivative.
        """
        pattern = self._pattern(call)
        if call.sums is not None:
            check_sums(call, pattern)
        expected = expected_gradients(call.target)
        if expected is not None:
            check_ranked(call, pattern, expected)
        elif all(t is None for t in call.tangents) or _is_random(call):
            return pattern
        elif (example := in_numbers(call, self.scratch.mode)) is not None:
            self.pattern(example)
        elif not self._check_smaller(call) and elements(call) <= MAX_ELEMENTS_UNCHANGED:
            check_numbers(call, pattern)
        return pattern

    def _check_smaller(self, call: OperatorCall) -> bool:
        """Check a large ``call`` as a smaller one, and return whether that was possible."""
        for small in smaller(call, self.scratch.mode) if elements(call) > MAX_ELEMENTS else ():
            if (self.absent, small.proof_key) in self.proven:
                return True
            try:
                pattern = self._pattern(small)
            except INVALID:
                continue  # the call itself was traced: its arguments do not fit the smaller operands
            if check_numbers(small, pattern):
                self.proven.add((self.absent, small.proof_key))
                return True
        return False

    def _pattern(self, call: OperatorCall) -> Pattern:
        inputs: list[fx.Node] = []
        for x, grad, first in zip(call.operands, call.grads, call.first_use, strict=True):
            is_new = first == len(inputs)
            inputs.append(self.scratch.placeholder("x", x, needs_grad=grad) if is_new else inputs[first])
        tangents = [None if t is None else self.scratch.placeholder("t", t) for t in call.tangents]
        args, kwargs = call.with_operands(inputs)
        results, pullback = self.operators.apply(call.target, args, kwargs, call.wanted, call.sums)
        terms = pullback(tangents) if any(t is not None for t in tangents) else [None] * len(inputs)
        return Pattern(tuple(inputs), tuple(tangents), tuple(results), tuple(terms))


def _has_dense_rows(node: fx.Node) -> bool:
    """Return whether the elements of a row are neighbours in memory, by the fake tensor."""
    x = value(node)
    return x.dim() == 0 or x.shape[-1] < 2 or x.stride(-1) == 1


def _is_random(call: OperatorCall) -> bool:
    """Return whether two runs of a call differ."""
    schema = schema_or_none(call.target)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            args, kwargs = call.arguments
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value))
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
