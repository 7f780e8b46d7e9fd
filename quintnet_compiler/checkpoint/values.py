"""Values of an optimizer's state as JSON, and back: containers keep their kinds, tensors are stored by path."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from torch import Tensor

from ..core.errors import CheckpointError

Put = Callable[[str, Tensor], None]
Get = Callable[[str], Tensor]


def path_of(key: str) -> str:
    """A state's key without separators."""
    return quote(key, safe="")


def encoded(x: Any, path: str, what: str, put: Put) -> Any:
    """``x`` as JSON. A tensor becomes ``{"tensor": path}``, and is given to ``put``; a tuple, a dict, a deque become
    objects with one key, their kind.

    Args:
        path: of ``x``; parts of it add ``:key``.
        what: names ``x`` in errors.

    Raises:
        CheckpointError: QN603 for what is none of these, nor None, a bool, a number or text.
    """

    def each(items: Any) -> list[Any]:
        return [encoded(one, f"{path}:{i}", what, put) for i, one in enumerate(items)]

    if isinstance(x, Tensor):
        put(path, x)
        return {"tensor": path}
    if type(x) in (bool, int, float, str, type(None)):
        return x
    if type(x) is list:
        return each(x)
    if type(x) is tuple:
        return {"tuple": each(x)}
    if type(x) is deque:
        return {"deque": [x.maxlen, each(x)]}
    if isinstance(x, Mapping) and all(type(key) in (str, int) for key in x):
        return {"dict": [[key, encoded(one, f"{path}:{path_of(str(key))}", what, put)] for key, one in x.items()]}
    raise CheckpointError(
        "QN603",
        f"{what} is a {type(x).__name__}, which a checkpoint cannot hold",
        fix="keep tensors, numbers, texts, and lists, tuples or dicts of them",
    )


def decoded(x: Any, get: Get) -> Any:
    """What :func:`encoded` was given, with the tensors of ``get``."""
    if isinstance(x, list):
        return [decoded(one, get) for one in x]
    if not isinstance(x, dict):
        return x
    match x:
        case {"tensor": str(path)}:
            return get(path)
        case {"tuple": list(items)}:
            return tuple(decoded(one, get) for one in items)
        case {"deque": [length, list(items)]}:
            return deque((decoded(one, get) for one in items), length)
        case {"dict": list(items)}:
            return {key: decoded(one, get) for key, one in items}
    return {key: decoded(one, get) for key, one in x.items()}  # as earlier versions wrote it
