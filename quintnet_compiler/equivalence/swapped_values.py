"""Temporary other values of a module's tensors, in place: hooks and identities stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .module_step import Owner


@contextlib.contextmanager
def double(owner: Owner) -> Iterator[None]:
    """Convert the module to float64 inside."""
    with _replaced(owner, lambda x: x.double()):
        yield


@contextlib.contextmanager
def rounded_otherwise(owner: Owner) -> Iterator[None]:
    """Change every parameter inside as another rounding might have done."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return x * (1 + signs * torch.finfo(x.dtype).eps).to(x.dtype)

    with _replaced(owner, other):
        yield


@contextlib.contextmanager
def _replaced(owner: Owner, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    tensors = {id(x): x for m in owner.modules for x in (*m.parameters(), *m.buffers())}
    tensors |= {id(x): x for x in owner.tensors.values()}
    floating = [x for x in tensors.values() if x.is_floating_point() and not x.is_meta]
    saved = [(x, x.data, x.grad if x.is_leaf else None) for x in floating]
    try:
        for x, data, _ in saved:
            x.grad = None
            x.data = change(data)
        yield
    finally:
        for x, data, grad in saved:
            x.grad = None
            x.data = data
            x.grad = grad
