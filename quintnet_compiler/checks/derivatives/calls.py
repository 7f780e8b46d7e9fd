"""A call of an operator, and the pattern of its forward and backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...core.errors import REPORT, CompileError

INVALID = (RuntimeError, IndexError, ValueError, TypeError)  # what operators raise for arguments that do not fit


@dataclass(frozen=True)
class Pattern:
    """A small graph that a checked graph should contain.

    Attributes:
        inputs: placeholders for the nodes that the operator reads.
        tangents: for each output a placeholder for its gradient, or None without one.
        outputs: what the forward computes.
        gradients: what the backward computes for each input, or None.
    """

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class OperatorCall:
    """An operator with fake operands.

    Attributes:
        target: the operator.
        arguments: positional and keyword arguments; each node in them stands for the next of ``operands``.
        operands: fake tensors.
        grads: for each operand, whether it needs a gradient.
        first_use: for each operand, the position of the first operand that is the same value.
        tangents: for each output, the gradient that arrives, as a fake tensor, or None.
        wanted: the outputs that a gradient may reach.
        sums: the dtype in which the rows of a lookup's gradient are added up, if not their own.
    """

    target: Any
    arguments: tuple[Any, Any]
    operands: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    first_use: tuple[int, ...]
    tangents: tuple[Tensor | None, ...]
    wanted: tuple[int, ...]
    sums: torch.dtype | None = None

    @property
    def proof_key(self) -> Hashable:
        """Return a key that is equal for calls which differ in the values of their tensors alone."""
        literals = repr(fx.map_arg(self.arguments, lambda _: "*"))
        tensors = tuple(
            None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device)
            for x in (*self.operands, *self.tangents)
        )
        return self.target, literals, tensors, self.grads, self.first_use, self.wanted, self.sums

    def with_operands(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments with ``operands`` in place of its own."""
        following = iter(operands)
        arguments: tuple[Any, Any] = fx.map_arg(self.arguments, lambda _: next(following))
        return arguments


def wrong(call: OperatorCall, what: str) -> CompileError:
    """Return error QN209: the derivative of an operator is not its derivative."""
    return CompileError("QN209", f"backward check: the derivative of {call.target} is wrong: {what}", fix=REPORT)
