"""Private names of torch: tensors that forward makes of Python numbers, whose values a trace knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor

__all__ = ["constants_have_values"]

_LIMIT, _LARGEST = "CONSTANT_NUMEL_LIMIT", 4096  # elements


@contextlib.contextmanager
def constants_have_values() -> Iterator[None]:
    """Inside, a trace knows the values of tensors that are made of Python numbers (``torch.tensor([[1, 4, 4]])``) and
    what is computed from these alone, up to 4,096 elements: ``.tolist()`` of them is a list of numbers. Instead:
    computing sizes in Python.

    torch keeps such values twice, for tensors of one element. Those that belong to fake tensors are given up when
    something else is written into the tensor or a view of it; those that belong to proxies are not given up for a
    view (``x[0] = y``), and would be a number of the past. So there are none of them here.
    """
    with mock.patch.object(fake_tensor, _LIMIT, _LARGEST), mock.patch.object(proxy_tensor, _LIMIT, 0):
        yield
