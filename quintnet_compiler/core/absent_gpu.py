"""Compile for a GPU that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from ..compat.torch_codegen import SHIPPED


@dataclass(frozen=True)
class AbsentGpu:
    """What PyTorch asks a device when it chooses kernels; by default Hopper (H100, H200).

    Attributes:
        capability: compute capability, major and minor.
        cudnn: whether PyTorch tries cuDNN's attention before its own.
    """

    capability: tuple[int, int] = (9, 0)
    cudnn: bool = True


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def on_device(arguments: Any, device: torch.device) -> Any:
    """Return an operator's arguments with every device replaced by ``device``."""
    return map_aggregate(arguments, lambda x: device if isinstance(x, torch.device) else x)


def compute_device(device: torch.device) -> torch.device:
    """Return the device to compute on with fake tensors of ``device``: the CPU for CUDA where PyTorch has none.

    Functions of torch in Python (indexing, ``contiguous``) ask for the device of a tensor, and would fail.
    """
    return CPU if device.type == CUDA.type and not torch.cuda.is_available() else device


def call_fake(target: Callable[..., Any], args: Any, kwargs: Any, known: MutableMapping[Any, Any] | None = None) -> Any:
    """Return ``target(*args, **kwargs)`` on fake tensors, computed on the device of :func:`compute_device`.

    To be called inside their fake mode. Several calls of one mode may share ``known``, the tensors that stand in for
    others: those of equal shape, strides, dtype and device are one.
    """
    substituted = False
    tensors = {} if known is None else known

    def like(x: Tensor, device: torch.device) -> Tensor:
        key = "like", tuple(x.shape), x.stride(), x.dtype, device
        if key not in tensors:
            tensors[key] = SHIPPED.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        tensor: Tensor = tensors[key]
        return tensor

    def to_substitute(x: Any) -> Any:
        nonlocal substituted
        device = x.device if isinstance(x, Tensor) else x
        if not isinstance(device, torch.device) or (substitute := compute_device(device)) is device:
            return x
        substituted = True
        return substitute if x is device else like(x, substitute)

    moved_args, moved_kwargs = map_aggregate((args, kwargs), to_substitute)
    result = target(*moved_args, **moved_kwargs)
    if not substituted:
        return result
    return map_aggregate(result, lambda x: like(x, CUDA) if isinstance(x, Tensor) else x)
