"""What is proven: an operator with its operands, and what its forward and backward are made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ....core.errors import REPORT, CompileError

INVALID = (RuntimeError, IndexError, ValueError, TypeError)  # what operators raise for arguments that do not fit


@dataclass(frozen=True)
class Pattern:
    """What a graph should compute, as a small graph of its own: ``inputs`` and ``tangents`` stand for nodes of the
    checked graph; ``outputs`` and ``gradients`` are what it must contain."""

    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class OperatorCall:
    """An operator and what its operands look like. ``given``: its arguments, in which each node stands for the next of
    ``operands``; ``same``: for each of these the first that is the same value. ``tangents``: for each output the
    gradient that arrives, if one does; ``wanted``: the outputs through which one may. ``sums``: the dtype in which the
    rows of a lookup's gradient are added up, if not in their own."""

    target: Any
    given: tuple[Any, Any]
    operands: tuple[Tensor, ...]
    grads: tuple[bool, ...]
    same: tuple[int, ...]
    tangents: tuple[Tensor | None, ...]
    wanted: tuple[int, ...]
    sums: torch.dtype | None = None

    @property
    def look(self) -> Hashable:
        """Equal of two calls that differ in nothing but which tensors they are given."""
        literals = repr(fx.map_arg(self.given, lambda _: "*"))
        tensors = tuple(
            None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device)
            for x in (*self.operands, *self.tangents)
        )
        return self.target, literals, tensors, self.grads, self.same, self.wanted, self.sums

    def filled(self, with_: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments with these in the operands' places."""
        following = iter(with_)
        found: tuple[Any, Any] = fx.map_arg(self.given, lambda _: next(following))
        return found


def wrong(call: OperatorCall, what: str) -> CompileError:
    return CompileError("QN209", f"backward check: the derivative of {call.target} is wrong: {what}", fix=REPORT)
