"""Private names of torch: operators that take functions (``torch.cond``, ``scan``, ``map``, ``while_loop``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch._higher_order_ops import utils

__all__ = ["control_flow_by"]

_RUNS = "_hop_compile_and_call"  # torch 2.11 has no such function: there, these operators are not traced


@contextlib.contextmanager
def control_flow_by(run: Callable[[str, Sequence[Any], Callable[[], Any]], Any], replace: Any) -> Iterator[None]:
    """Inside, an operator that takes functions is ``run(its name, its arguments, what torch would do)``.
    ``replace(ours, theirs)`` is what the process calls meanwhile. Instead: functions of our own in their places, which
    a model that imported them before would not call."""
    theirs = getattr(utils, _RUNS, None)
    if theirs is None:
        yield
        return

    def ours(function: Any, arguments: Sequence[Any], options: Any = None) -> Any:
        name = function.__qualname__.partition(".")[0]
        if name == "map":  # the structure of its arguments is known to ``function`` alone
            with mock.patch.object(sys.modules[function.__module__], "map_impl", lambda *given: given):
                arguments = function(*arguments)
        return run(name, arguments, lambda: theirs(function, arguments, options))

    with mock.patch.object(utils, _RUNS, replace(ours, theirs)):
        yield
