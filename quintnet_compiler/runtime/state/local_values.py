"""A rank's parts of a module's parameters and of their gradients, as DTensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compat.distributed import dtensor_over, local_tensor
from ...compat.torch import foreach_norm, plain_function
from ...core import slices
from ...core.errors import RunError
from ...core.sharding import Sharding
from .true_part import TruePart


class StageGradient(DTensor):
    """The gradient of a parameter of one pipeline stage; a norm over one rank's gradients is not the model's norm.

    Raises:
        RunError: QN113 by torch.nn.utils.clip_grad_norm_ and torch.optim.LBFGS.
    """

    @staticmethod
    def __torch_function__(
        func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.linalg.vector_norm, foreach_norm, Tensor.view):
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller == "torch.optim.lbfgs":
                raise RunError(
                    "QN113",
                    "this rank has the gradients of its pipeline stages alone, and LBFGS needs products of all",
                    fix="use a mesh without pp, or an optimizer that updates each parameter by itself, as AdamW",
                )
            if caller == "torch.nn.utils.clip_grad":
                raise RunError(
                    "QN113",
                    "this rank has the gradients of its pipeline stages alone, and would clip by their norm",
                    fix="use program.clip_grad_norm(max_norm): the norm of all gradients, on every rank",
                )
        return plain_function(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return the same values, no longer as the gradient of a parameter."""
        copied: Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied


def whole_number(x: DTensor) -> Any:
    """Return the Python number of a replicated DTensor.

    Raises:
        RunError: QN113 for a DTensor of which each rank has a part or a term.
    """
    if not all(placement.is_replicate() for placement in x.placements):
        raise RunError(
            "QN113",
            f"a number was asked for of which each rank has a part ({', '.join(map(str, x.placements))}): a norm or "
            "sum of a split parameter or gradient",
            fix="x.full_tensor().item() on every rank; in an optimizer's step, make it with program.optimizer(make)",
        )
    return local_tensor(x).item()


@dataclass(frozen=True)
class StoredPart:
    """The part of a parameter that a rank stores.

    Attributes:
        shape: the global shape.
        sharding: the type on each axis.
        sizes: the number of ranks of each axis.
        places: this rank's coordinate on each axis.
        true: the part without padding.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    true: TruePart

    def __call__(self, x: Any, like: DTensor) -> Any:
        """Return the part of a whole tensor as a DTensor like ``like``; return anything else unchanged."""
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or tuple(x.shape) != self.shape:
            return x
        part = self.true.of_padded(slices.take_all(x.detach(), self.sharding, self.sizes, self.places)).to(like.device)
        shape, stride = torch.Size(self.shape), like.stride()
        return dtensor_over(part, like.device_mesh, like.placements, shape, stride)
