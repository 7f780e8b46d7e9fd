"""A rank's parts of a module's parameters and of their gradients, as DTensors, and what they give as numbers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...compat.distributed import draws_by, dtensor_over, local_tensor, numbers_by
from ...compat.torch import foreach_norm, plain_function, schema
from ...core.errors import RunError

aten = torch.ops.aten
# what draws numbers for its first argument, and reads no value of it
_FILLS = (
    aten.normal_, aten.uniform_, aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_, aten.random_,
    aten.bernoulli_, aten.rand_like, aten.randn_like, aten.randint_like,
)  # fmt: skip
_READS_PROBABILITIES = (aten.bernoulli,)


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


def read_and_draw_whole_dtensors() -> None:
    """Let DTensors of this process give Python numbers, and draw random numbers, as whole tensors do, from now on.

    torch reads and draws each rank's part by itself: on CPUs, all parts get the same random numbers.
    """
    numbers_by(whole_number)
    packets = (*_FILLS, *_READS_PROBABILITIES)
    draws_by(tuple(getattr(packet, name) for packet in packets for name in packet.overloads()), _draw)  # type: ignore[no-untyped-call]


def _draw(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    """Draw the whole tensor on every rank, and return this rank's part.

    Raises:
        RunError: QN113 for the gradient of a pipeline stage: other ranks would not draw these numbers.
    """
    x: DTensor = args[0]
    if isinstance(x, StageGradient):
        raise RunError(
            "QN113",
            "random numbers were asked for a gradient of this rank's pipeline stages: the unsplit module would draw "
            "those of all parameters, one after the other",
            fix="use a mesh without pp",
        )
    whole = _whole(x) if function.overloadpacket in _READS_PROBABILITIES else _empty(x)
    rest = [_whole(value) if isinstance(value, DTensor) else value for value in args[1:]]
    drawn = function(whole, *rest, **kwargs)
    replicated = DTensor.from_local(drawn, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    part = local_tensor(replicated.redistribute(placements=x.placements))
    if schema(function).is_mutable:
        local_tensor(x).copy_(part)
        return x
    return dtensor_over(part, x.device_mesh, x.placements, x.shape, tuple(drawn.stride()))


def _whole(x: DTensor) -> Tensor:
    whole: Tensor = x.full_tensor()
    return whole


def _empty(x: DTensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=local_tensor(x).device)
