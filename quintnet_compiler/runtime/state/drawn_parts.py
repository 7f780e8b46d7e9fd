"""Random numbers for DTensors: those that the unsplit module would draw for the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...compat.distributed import draws_by, dtensor_over, local_tensor
from ...core.errors import RunError
from .local_values import StageGradient

aten = torch.ops.aten
# what draws numbers for its first argument, and reads no value of it
_FILLS = (
    aten.normal_, aten.uniform_, aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_, aten.random_,
    aten.bernoulli_, aten.rand_like, aten.randn_like, aten.randint_like,
)  # fmt: skip
_READS_PROBABILITIES = (aten.bernoulli,)


def draw_whole_tensors() -> None:
    """Draw random numbers for all DTensors of this process as for whole tensors, from now on.

    torch draws each rank's part by itself: on CPUs, all parts get the same numbers.
    """
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
    if function._schema.is_mutable:
        local_tensor(x).copy_(part)
        return x
    return dtensor_over(part, x.device_mesh, x.placements, x.shape, tuple(drawn.stride()))


def _whole(x: DTensor) -> Tensor:
    whole: Tensor = x.full_tensor()
    return whole


def _empty(x: DTensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=local_tensor(x).device)
