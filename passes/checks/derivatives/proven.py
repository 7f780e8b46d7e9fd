"""Patterns of operators with their backward, each proven the first time that it is used."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from ....compat.torch import schema_or_none
from ....core.absent_gpu import AbsentGpu
from ....core.annotations import value
from ....ir.builder import GraphBuilder
from ...autodiff.vector_jacobian import VectorJacobian
from .calls import INVALID, OperatorCall, Pattern
from .numbers import check_numbers
from .of_ranks import RANKED, check_ranked, check_sums
from .operands import elements
from .smaller_calls import in_numbers, smaller

MOST = 1 << 13  # elements of all operands together: more are made fewer
MOST_AS_THEY_ARE = 1 << 22  # where they cannot be made fewer


class Derivatives:
    """Patterns of operators with their backward, in the graph of ``scratch``. ``templates``: those traced already;
    ``proven``: smaller calls whose trace was right, also in other programs."""

    def __init__(
        self,
        scratch: GraphBuilder,
        templates: dict[Hashable, Any],
        absent: AbsentGpu | None = None,
        proven: set[Hashable] | None = None,
    ) -> None:
        self.absent, self.proven = absent, set[Hashable]() if proven is None else proven
        self.scratch, self.operators = scratch, VectorJacobian(scratch, templates, _rows, absent)

    def pattern(self, call: OperatorCall) -> Pattern:
        """What ``call`` and its backward are.

        Raises:
            CompileError: QN209 if the template that says so is not the derivative.
        """
        made = self._pattern(call)
        if call.sums is not None:
            check_sums(call, made)
        if call.target in RANKED:
            check_ranked(call, made)
        elif all(t is None for t in call.tangents) or _random(call):
            return made
        elif (example := in_numbers(call, self.scratch.mode)) is not None:
            self.pattern(example)
        elif not self._check_smaller(call) and elements(call) <= MOST_AS_THEY_ARE:
            check_numbers(call, made)
        return made

    def _check_smaller(self, call: OperatorCall) -> bool:
        """Whether a large ``call`` was checked as a smaller one."""
        for small in smaller(call, self.scratch.mode) if elements(call) > MOST else ():
            if (self.absent, small.look) in self.proven:
                return True
            try:
                pattern = self._pattern(small)
            except INVALID:
                continue  # the call itself was traced: its arguments do not fit the smaller operands
            if check_numbers(small, pattern):
                self.proven.add((self.absent, small.look))
                return True
        return False

    def _pattern(self, call: OperatorCall) -> Pattern:
        stands: list[fx.Node] = []
        for x, grad, first in zip(call.operands, call.grads, call.same, strict=True):
            new = first == len(stands)
            stands.append(self.scratch.placeholder("x", x, needs_grad=grad) if new else stands[first])
        tangents = [None if t is None else self.scratch.placeholder("t", t) for t in call.tangents]
        args, kwargs = call.filled(stands)
        made, pullback = self.operators.apply(call.target, args, kwargs, call.wanted, call.sums)
        terms = pullback(tangents) if any(t is not None for t in tangents) else [None] * len(stands)
        return Pattern(tuple(stands), tuple(tangents), tuple(made), tuple(terms))


def _rows(place: fx.Node) -> bool:
    """Whether the elements of a row are neighbours, as its fake tensor has it; a program may take more care."""
    x = value(place)
    return x.dim() == 0 or x.shape[-1] < 2 or x.stride(-1) == 1


def _random(call: OperatorCall) -> bool:
    """Whether two runs differ."""
    schema = schema_or_none(call.target)
    for position, known in enumerate(schema.arguments if schema is not None else ()):
        if known.name == "dropout_p":
            args, kwargs = call.given
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p", known.default_value))
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
