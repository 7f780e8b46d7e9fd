"""Private names of torch: activation checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.utils.checkpoint as checkpoints

__all__ = ["without_checkpoints"]


@contextlib.contextmanager
def without_checkpoints(replace: Callable[[Any, Any], Any]) -> Iterator[list[str]]:
    """Inside, ``torch.utils.checkpoint`` calls its function once, and keeps what autograd saves. ``replace(ours,
    theirs)`` is what the process calls meanwhile. Yields a list with an entry for each call. Instead: the module of
    which somebody has removed them."""
    calls: list[str] = []
    reentrant = checkpoints.CheckpointFunction.apply
    other = "_checkpoint_without_reentrant_generator"
    theirs = getattr(checkpoints, other)

    def at_once(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        calls.append("reentrant")
        return function(*args)

    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        calls.append("not reentrant")
        yield

    with (
        mock.patch.object(checkpoints.CheckpointFunction, "apply", staticmethod(replace(at_once, reentrant))),
        mock.patch.object(checkpoints, other, replace(nothing, theirs)),
    ):
        yield calls
