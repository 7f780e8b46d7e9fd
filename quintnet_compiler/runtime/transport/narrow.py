"""Send 8-bit floating-point numbers between ranks as bytes, since gloo and older NCCL have no such dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .transport import Pending


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a dtype is an 8-bit floating-point one."""
    return dtype.is_floating_point and dtype.itemsize == 1


def as_bytes(x: Tensor) -> Tensor:
    """Return a view as bytes of a tensor of 8-bit floating-point numbers, another tensor unchanged."""
    return x.view(torch.uint8) if is_narrow(x.dtype) else x


def moved_as_bytes(begin: Callable[..., Pending]) -> Callable[..., Pending]:
    """Return ``begin``, a collective that only moves data, extended to 8-bit floating-point numbers."""

    def begin_as_bytes(x: Any, *args: Any, **options: Any) -> Pending:
        first = x if isinstance(x, Tensor) else next(iter(x), None)
        if not (isinstance(first, Tensor) and is_narrow(first.dtype)):
            return begin(x, *args, **options)
        data = as_bytes(x) if isinstance(x, Tensor) else [as_bytes(part) for part in x]
        wait = begin(data, *args, **options)

        def wait_and_view() -> Any:
            result = wait()
            return (
                result.view(first.dtype)
                if isinstance(result, Tensor)
                else tuple(part.view(first.dtype) for part in result)
            )

        return wait_and_view

    return begin_as_bytes
