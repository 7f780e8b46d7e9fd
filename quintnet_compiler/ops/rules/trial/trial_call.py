"""A call of an operator on numbers, which runs again with other tensors in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from ....compat.torch import OpOverload, pytree

RELATIVE_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class TrialCall:
    """A call of an operator.

    Attributes:
        operator: what is called.
        leaves: its arguments, those in lists and tuples too.
        form: how the arguments nest.
    """

    operator: OpOverload
    leaves: tuple[Any, ...]
    form: pytree.TreeSpec

    @staticmethod
    def from_arguments(operator: OpOverload, arguments: Sequence[Any]) -> TrialCall:
        """Return the call of positional arguments; a dict at their end has arguments by keyword."""
        keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
        positional = tuple(arguments[: len(arguments) - 1] if keywords else arguments)
        leaves, form = pytree.tree_flatten((positional, keywords))
        detached = (leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return TrialCall(operator, tuple(detached), form)

    @property
    def input_tensors(self) -> list[Tensor]:
        """Return the inputs, in the order in which a rule counts them."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> TrialCall:
        """Return the same call of other inputs."""
        rest = iter(tensors)
        return replace(self, leaves=tuple(next(rest) if isinstance(x, Tensor) else x for x in self.leaves))

    def output_tensors(self) -> tuple[Tensor, ...]:
        """Run the operator."""
        positional, keywords = pytree.tree_unflatten(list(self.leaves), self.form)
        with torch.no_grad():
            outputs = self.operator(*positional, **keywords)
        return tuple(x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor))

    def in_float64(self) -> TrialCall:
        """Return the call in float64, or this one where the operator takes no float64."""
        wide = self.with_tensors([x.double() if x.is_floating_point() else x for x in self.input_tensors])
        try:
            wide.output_tensors()
        except Exception:  # of whatever kind: the operator has kernels for other dtypes alone
            return self
        return wide

    def shuffled(self, generator: Generator) -> TrialCall:
        """Return the call with the elements of each float input in another order: other numbers of the same domain."""
        return self.with_tensors([_shuffled(x, generator) if x.is_floating_point() else x for x in self.input_tensors])

    def normal(self, generator: Generator) -> TrialCall:
        """Return the call with normal numbers in float inputs."""
        return self.with_tensors(
            [normal_like(x, generator) if x.is_floating_point() else x for x in self.input_tensors]
        )

    def has_numbers(self) -> bool:
        """Return whether the operator takes these inputs, and returns no NaN."""
        try:
            return not any(bool(x.isnan().any()) for x in self.output_tensors())
        except Exception:  # of whatever kind: the numbers are not of its domain
            return False


def normal_like(x: Tensor, generator: Generator) -> Tensor:
    """Return normal numbers in the shape, dtype and device of ``x``."""
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def _shuffled(x: Tensor, generator: Generator) -> Tensor:
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    return x.flatten()[order].view(x.shape)


def nearly_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal, but for rounding."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    tolerance = RELATIVE_TOLERANCES.get(x.dtype)
    if tolerance is None or not x.numel():
        return torch.equal(x, y)
    finite = x.nan_to_num(0, 0, 0)
    scale = max(1.0, float(finite.abs().max()))
    return torch.allclose(x, y, rtol=0, atol=tolerance * scale, equal_nan=True)
