"""Private names of torch: functions that torch.jit.script made, and the Python that they were made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.jit._state import _try_get_jit_cached_function

__all__ = ["script_calls_by", "source_of"]

_CALLED: tuple[Any, ...] = (torch.jit.ScriptFunction, torch._C.ScriptMethod)


def source_of(function: Any) -> Callable[..., Any] | None:
    """Return the Python that torch.jit.script compiled; None of a method or of torch.jit.trace.

    Instead: the user's own name for it.
    """
    source: Callable[..., Any] | None = getattr(function, "_torchdynamo_inline", None)
    scripted: Any = None if source is None else _try_get_jit_cached_function(source)  # type: ignore[no-untyped-call]
    return source if scripted is not None and scripted.qualified_name == function.qualified_name else None


@contextlib.contextmanager
def script_calls_by(call: Callable[..., Any], replace: Any) -> Iterator[None]:
    """Inside, the call of a function or method that torch.jit made is ``call(function, *args, **kwargs)``; instead: its
    graph as operators with gradients, which the second call of one has not. ``replace(ours, theirs)`` is what the
    process calls meanwhile."""
    with contextlib.ExitStack() as stack:
        for kind in _CALLED:
            stack.enter_context(mock.patch.object(kind, "__call__", replace(call, kind.__call__)))
        yield
