"""Shapes of an optimizer's state in a file, compared with those that the optimizer would use."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CheckpointError, CheckpointWarning
from ...weights.files import shown
from .plain_values import KERNELS, arguments_of, class_of_updates

_SIZES = (2, 3, 5, 7, 11, 13)  # of a small parameter's dims; each names its dim


@dataclass(frozen=True)
class SavedState:
    """Describe a parameter's state in a file.

    ``shape``: of the whole parameter; ``options``: of its group; ``sizes``: of each tensor of the state, by key.
    """

    name: str
    options: Mapping[str, Any]
    sizes: Mapping[str, torch.Size]
    shape: torch.Size


@dataclass(frozen=True)
class StateShapes:
    """Compare shapes of tensors in a file with those of ``optimizer``'s state.

    One of torch's own says it, also by a class that only sets its options: it takes a step of a small parameter of as
    many dims, each of another size. Of others, what is known is the state that they have. Of a new one, nothing is
    known: state of the parameter's shape, and numbers, are usual; of other shapes, a warning tells.

    Attributes:
        optimizer: that gets the state.
        unknown: a line for each tensor whose shape was compared with nothing.
    """

    optimizer: torch.optim.Optimizer
    unknown: list[str] = field(default_factory=list)
    _patterns: dict[tuple[str, int], dict[str, torch.Size]] = field(default_factory=dict)

    def require_fitting(self, saved: SavedState, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Compare a parameter's state with what the optimizer would use.

        Args:
            saved: what a file has.
            parameter: this rank's.
            state: what the optimizer has of it.

        Raises:
            CheckpointError: QN602, naming the tensor.
        """
        of_torch = self._of_torch(saved.options, saved.shape)
        alike = {key for key, x in state.items() if isinstance(x, Tensor) and x.dim() and x.shape == parameter.shape}
        wanted = dict.fromkeys(alike, saved.shape) | of_torch
        for key, size in saved.sizes.items():
            # a number may have any dims; where the optimizer is not torch's, one may become more
            number = size.numel() == 1 and not (of_torch and wanted.get(key))
            if wanted.get(key, size) != size and not number:
                raise CheckpointError(
                    "QN602",
                    f"{shown(key)} of {saved.name} is {tuple(size)} in the checkpoint, and "
                    f"{type(self.optimizer).__name__} keeps it as {tuple(wanted[key])}",
                    fix="load a checkpoint that has not been changed",
                )

    def require_complete(self, saved: SavedState, keys: Collection[str]) -> None:
        """Refuse a state of which only some ``keys`` are there: torch's optimizers make all of them, or none.

        Raises:
            CheckpointError: QN602, naming the tensors.
        """
        lacking = self._of_torch(saved.options, saved.shape).keys() - set(keys)
        if keys and lacking:
            names = ", ".join(sorted(lacking))
            text = f"{names} of {saved.name} is missing in the checkpoint, and {type(self.optimizer).__name__} keeps it"
            raise CheckpointError("QN602", text, fix="load a checkpoint that has not been changed")

    def note_unknown(self, saved: SavedState, state: Mapping[str, Any]) -> None:
        """Note tensors whose shapes nothing says, neither torch nor the optimizer's ``state`` of the parameter."""
        if self._of_torch(saved.options, saved.shape):
            return
        own = {key: x.shape for key, x in state.items() if isinstance(x, Tensor)}
        usual = {saved.shape, *(size for size in saved.sizes.values() if size.numel() == 1)}
        self.unknown.extend(
            f"{shown(key)} of {saved.name}, {tuple(size)} for a parameter {tuple(saved.shape)}"
            for key, size in saved.sizes.items()
            if size not in usual and own.get(key) != size
        )

    def warn_of_unknown(self) -> None:
        """Warn of state whose shape nothing says, once for all parameters."""
        if self.unknown:
            more = f" and {len(self.unknown) - 1} more" if len(self.unknown) > 1 else ""
            text = (
                f"{type(self.optimizer).__name__} gets state of the shapes that the checkpoint has, which nothing here "
                f"says: {self.unknown[0]}{more}"
            )
            warnings.warn(CheckpointWarning(text), stacklevel=2)

    def _of_torch(self, options: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.Size]:
        kind = class_of_updates(self.optimizer)
        if len(shape) > len(_SIZES) or kind is None:
            return {}
        key = repr(sorted(options.items())), len(shape)
        if key not in self._patterns:
            self._patterns[key] = _pattern(kind, options, self.optimizer.param_groups[0], len(shape))
        sizes = dict(zip(_SIZES, shape, strict=False)) | {1: 1}
        return {
            name: torch.Size(sizes[size] for size in pattern)
            for name, pattern in self._patterns[key].items()
            if sizes.keys() >= set(pattern)
        }


def _pattern(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any], dims: int
) -> dict[str, torch.Size]:
    """Return the shapes of the state of a small parameter; none if the optimizer takes no such one, or no step of it.

    No hook of a step is called.
    """
    arguments = arguments_of(kind, options, group)
    parameter = nn.Parameter(torch.zeros(_SIZES[:dims]))
    parameter.grad = torch.zeros_like(parameter)
    make: Callable[..., torch.optim.Optimizer] = kind
    try:
        small = make([parameter], **{name: x for name, x in arguments.items() if name not in KERNELS})
        with torch.no_grad():
            inspect.unwrap(type(small).step)(small)
    except (RuntimeError, ValueError, TypeError):
        return {}
    state = small.state.get(parameter, {})
    return {key: x.shape for key, x in state.items() if isinstance(x, Tensor)}
