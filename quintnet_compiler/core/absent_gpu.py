"""A GPU that this machine does not have, and for which programs are compiled all the same."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate


@dataclass(frozen=True)
class AbsentGpu:
    """What PyTorch asks a device when it chooses kernels. By default: Hopper (H100, H200).

    ``capability``: compute capability, major and minor. ``cudnn``: whether PyTorch tries cuDNN's attention before its
    own.
    """

    capability: tuple[int, int] = (9, 0)
    cudnn: bool = True


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def on_device(given: Any, device: torch.device) -> Any:
    """Arguments of an operator, with ``device`` in the place of any."""
    return map_aggregate(given, lambda x: device if isinstance(x, torch.device) else x)


def stand_in(device: torch.device) -> torch.device:
    """Where to compute with fake tensors of ``device``: on the CPU instead of on CUDA that PyTorch does not have.

    Functions of torch in Python (indexing, ``contiguous``) ask for the device of a tensor, and would fail.
    """
    return CPU if device.type == CUDA.type and not torch.cuda.is_available() else device


def call_fake(target: Callable[..., Any], args: Any, kwargs: Any, known: MutableMapping[Any, Any] | None = None) -> Any:
    """``target(*args, **kwargs)`` on fake tensors, inside of their mode; where :func:`stand_in` says. ``known``: of
    several calls in the mode, tensors in the place of others: those that look the same are one."""
    gone, known = False, {} if known is None else known

    def like(x: Tensor, device: torch.device) -> Tensor:
        key = "like", tuple(x.shape), x.stride(), x.dtype, device
        if key not in known:
            known[key] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        found: Tensor = known[key]
        return found

    def there(x: Any) -> Any:
        nonlocal gone
        device = x.device if isinstance(x, Tensor) else x
        if not isinstance(device, torch.device) or (place := stand_in(device)) is device:
            return x
        gone = True
        return place if x is device else like(x, place)

    some, named = map_aggregate((args, kwargs), there)
    made = target(*some, **named)
    return map_aggregate(made, lambda x: like(x, CUDA) if isinstance(x, Tensor) else x) if gone else made
