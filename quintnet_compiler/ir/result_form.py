"""The form of a model's result: its structure, and the numbers, text and None in it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from ..compat.torch import pytree
from ..core.errors import CompileError
from .containers import held, rebuilt

_PLAIN = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum)


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor stands in this place."""


@dataclass(frozen=True)
class _SizePlace:
    """A size of the batch stands in this place, which the trace calls ``symbol``."""

    symbol: str


@dataclass(frozen=True)
class ResultForm:
    """The structure of what a model returns, and its leaves: a place for each tensor, and everything else."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of_result(cls, result: Any) -> tuple[ResultForm, list[Tensor]]:
        """Return the form of ``result`` and its tensors, in order.

        Raises:
            CompileError: QN101 if there is no tensor, or something that is neither a tensor nor plain data.
        """
        leaves, structure = pytree.tree_flatten(held(result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise CompileError("QN101", "the model returns no tensor", fix="return what it computes")
        return cls(structure, tuple(map(_place, leaves))), tensors

    def check(self, symbols: Mapping[str, str]) -> None:
        """Refuse numbers that the model computes from sizes, unless they are among ``symbols``.

        Raises:
            CompileError: QN101 for such a number.
        """
        for leaf in self.leaves:
            if isinstance(leaf, _SizePlace) and leaf.symbol not in symbols:
                raise CompileError(
                    "QN101",
                    f"the model returns a number that it computes of sizes of the batch ({leaf.symbol})",
                    fix="return the size itself, or leave the number out",
                )

    def result(self, tensors: Sequence[Tensor], symbols: Mapping[str, str], sizes: Mapping[str, int]) -> Any:
        """Return the model's result with these ``tensors``, for a batch of these ``sizes`` by name."""
        remaining = iter(tensors)
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _TensorPlace):
                leaves.append(next(remaining))
                continue
            leaves.append(sizes[symbols[leaf.symbol]] if isinstance(leaf, _SizePlace) else leaf)
        return rebuilt(pytree.tree_unflatten(leaves, self.structure))


def _place(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _TensorPlace()
    if isinstance(leaf, SymInt):
        return _SizePlace(str(leaf))
    if isinstance(leaf, _PLAIN):
        return leaf
    raise CompileError(
        "QN101",
        f"the model returns an object of the class {type(leaf).__name__}, of whose content nothing is known",
        fix="return tensors, numbers and text, in tuples, lists, dicts or dataclasses",
    )
