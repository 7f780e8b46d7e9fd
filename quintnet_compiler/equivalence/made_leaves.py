"""Which leaves of autograd's graph forward has made itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class MadeLeaves(TorchFunctionMode):
    """Notes, while inside, tensors without a place in autograd's graph that functions return. ``known``: further ones,
    such as the batch."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Tensor]] = {id(x): weakref.ref(x) for x in known}

    def __contains__(self, leaf: Tensor) -> bool:
        found = self._made.get(id(leaf))
        return found is not None and found() is leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor) and _is_leaf(x) and not any(x is given for given in args):
                self._made[id(x)] = weakref.ref(x)
        return made


def _is_leaf(x: Tensor) -> bool:
    try:
        return x.is_leaf
    except RuntimeError:  # a view that has no place in autograd's graph: made under no_grad, changed since
        return False
