"""Private names of torch: functions of lists of tensors (``torch._foreach_add_``), as calls for one tensor each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["FOREACH"]

_PREFIX = "_foreach_"
_OTHER_NAMES = MappingProxyType({"norm": torch.linalg.vector_norm, "pow": torch.pow})
_VALUES = ("addcmul", "addcdiv")  # their last argument has a name where there is one tensor


def _one_by_one(name: str, *args: Any, **kwargs: Any) -> list[Any] | None:
    """Compute ``torch._foreach_<name>`` by a call for each tensor, with one element of each list."""
    function: Callable[..., Any] = _OTHER_NAMES.get(name) or getattr(Tensor, name)
    if name.rstrip("_") in _VALUES and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    count = next(len(x) for x in args if isinstance(x, (list, tuple)))

    def element(x: Any, place: int) -> Any:
        return x[place] if isinstance(x, (list, tuple)) else x

    results = [
        function(*(element(x, i) for x in args), **{key: element(x, i) for key, x in kwargs.items()})
        for i in range(count)
    ]
    return None if name.endswith("_") else results


# Each such function, and what does the same with one operator for each tensor; instead: sharding rules for lists.
FOREACH: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        getattr(torch, name): functools.partial(_one_by_one, name.removeprefix(_PREFIX))
        for name in dir(torch)
        if name.startswith(_PREFIX) and hasattr(Tensor, name.removeprefix(_PREFIX))
    }
)
