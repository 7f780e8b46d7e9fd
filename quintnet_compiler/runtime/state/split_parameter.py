"""A module's parameter of which this process has a part: its ``data`` can be set, and it can be copied and pickled."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.distributed import local_tensor, replace_local_tensor
from ...compat.torch import plain_function
from ...core.errors import RunError
from .state import without_offset


class SplitParameter(DTensor):
    """A parameter that is a DTensor.

    In torch 2.13, ``parameter.data = x`` of a DTensor silently does nothing, and a DTensor whose part begins within a
    larger memory (as with ZeRO 1 and 2) cannot be copied.
    """

    __torch_function__ = plain_function

    @property
    def data(self) -> Tensor:
        """Return the values, without autograd, in the memory of this parameter."""
        return self.detach()

    @data.setter
    def data(self, x: Tensor) -> None:
        """Replace the memory of this parameter by that of ``x``.

        Raises:
            RunError: QN112 if ``x`` is not a DTensor of the same parts, shape, dtype and device.
        """
        replace_local_tensor(self, _part_for(self, x))

    @property
    def __tensor_flatten__(self) -> Any:
        """Absent, so that ``module.to(device)`` assigns ``data`` instead of an object of another class.

        Raises:
            AttributeError: always.
        """
        raise AttributeError("__tensor_flatten__")

    def detach(self) -> Tensor:
        """Return the values, without autograd, in the memory of this parameter.

        For ``nn.Parameter(x)``, which asks for one of the type of ``x``, return a parameter.
        """
        values = without_offset(super().detach())
        makes_parameter = sys._getframe(1).f_code is nn.Parameter.__new__.__code__
        return split_parameter(values, trainable=False) if makes_parameter else values

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameter:
        """Return a parameter with the same values and without gradient, as for a plain parameter."""
        if id(self) not in memo:
            memo[id(self)] = split_parameter(self.detach().clone(), trainable=self.requires_grad)
        copied: SplitParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.detach(), self.requires_grad)


def split_parameter(part: Tensor, *, trainable: bool) -> SplitParameter:
    """Return a parameter over a DTensor's memory."""
    parameter: Any = nn.Parameter(part, requires_grad=trainable)
    parameter.__class__ = SplitParameter
    return parameter  # type: ignore[no-any-return]


def _part_for(parameter: SplitParameter, x: Tensor) -> Tensor:
    """Return this process's part of ``x``, after checking that it fits the parameter."""
    if not isinstance(x, DTensor):
        raise RunError(
            "QN112",
            f"the data of a parameter {list(parameter.shape)}, of which this rank has a part, was set to a tensor "
            f"{list(x.shape)} that is no DTensor",
            fix="module.load_state_dict(state), which takes this rank's part of whole tensors",
        )
    expected, actual = _described(parameter), _described(x)
    if expected != actual or x.device_mesh != parameter.device_mesh:
        raise RunError(
            "QN112",
            f"the data of a parameter that is {expected} was set to {actual}",
            fix="keep averages as DTensors like the parameter: p.detach().clone(), torch.zeros_like(p)",
        )
    return local_tensor(x)


def _described(x: DTensor) -> str:
    parts = ", ".join(map(str, x.placements))
    return f"{list(x.shape)} {x.dtype} on {local_tensor(x).device.type} in parts ({parts})"
