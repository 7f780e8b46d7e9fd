"""Leaves of autograd's graph that forward makes itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class MadeLeaves(TorchFunctionMode):
    """A mode that records leaves of autograd's graph that functions return; ``leaves``: further ones, as the batch."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Tensor]] = {id(x): weakref.ref(x) for x in leaves}

    def __contains__(self, leaf: Tensor) -> bool:
        reference = self._made.get(id(leaf))
        return reference is not None and reference() is leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and _is_leaf(x) and not any(x is argument for argument in args):
                self._made[id(x)] = weakref.ref(x)
        return result


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view that was made under no_grad and changed since
        return False
