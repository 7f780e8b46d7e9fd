"""8-bit floating-point numbers on their way between ranks: as bytes, since gloo and older NCCL have no such dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .transport import Pending


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of floating-point numbers of 8 bits."""
    return dtype.is_floating_point and dtype.itemsize == 1


def as_bytes(x: Tensor) -> Tensor:
    """The same memory, as bytes where it holds numbers of 8 bits."""
    return x.view(torch.uint8) if is_narrow(x.dtype) else x


def moved_as_bytes(begin: Callable[..., Pending]) -> Callable[..., Pending]:
    """As ``begin``, a collective that moves what it is given and computes nothing, for numbers of 8 bits, too."""

    def begun(x: Any, *how: Any, **more: Any) -> Pending:
        first = x if isinstance(x, Tensor) else next(iter(x), None)
        if not (isinstance(first, Tensor) and is_narrow(first.dtype)):
            return begin(x, *how, **more)
        given = as_bytes(x) if isinstance(x, Tensor) else [as_bytes(one) for one in x]
        wait = begin(given, *how, **more)

        def arrived() -> Any:
            made = wait()
            return made.view(first.dtype) if isinstance(made, Tensor) else tuple(one.view(first.dtype) for one in made)

        return arrived

    return begun
