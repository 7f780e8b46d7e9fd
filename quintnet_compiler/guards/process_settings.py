"""Settings of the process that forward may ask for, of Python's library and of NumPy: compared where it names them."""

from __future__ import annotations

import contextvars
import decimal
import gc
import locale
import os
import sys
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy
import torch

from ..compat.torch_settings import settings_named


@dataclass(frozen=True, eq=False)
class ContextValues:
    """The variables of a context and what they hold: equal to others if these are the same objects."""

    variables: tuple[contextvars.ContextVar[Any], ...]
    values: tuple[Any, ...]

    @classmethod
    def read(cls) -> ContextValues:
        """Return those of the current context."""
        context = contextvars.copy_context()
        return cls(tuple(context.keys()), tuple(context.values()))

    def __eq__(self, other: object) -> bool:
        """Return whether the same variables hold the same objects."""
        return (
            isinstance(other, ContextValues)
            and self.variables == other.variables
            and all(map(is_, self.values, other.values))
        )


def _decimal_context() -> tuple[Any, ...]:
    """Return what decides about results, without the flags that each operation may set."""
    context = decimal.getcontext()
    limits = context.prec, context.rounding, context.Emin, context.Emax
    return *limits, context.capitals, context.clamp, tuple(context.traps.items())


_READERS: dict[str, Callable[[], Any]] = {
    "copy_context": ContextValues.read,
    "current_thread": lambda: threading.current_thread().name,
    "environ": lambda: dict(os.environ),
    "Decimal": _decimal_context,
    "get_dir": torch.hub.get_dir,
    "get_int_max_str_digits": sys.get_int_max_str_digits,
    "get_printoptions": numpy.get_printoptions,
    "get_threshold": gc.get_threshold,
    "getcontext": _decimal_context,
    "getcwd": os.getcwd,
    "getenv": lambda: dict(os.environ),
    "geterr": numpy.geterr,
    "getlocale": locale.localeconv,
    "getrecursionlimit": sys.getrecursionlimit,
    "getswitchinterval": sys.getswitchinterval,
    "isenabled": gc.isenabled,
    "localcontext": _decimal_context,
    "localeconv": locale.localeconv,
}


def readers_of(names: Set[str]) -> tuple[Callable[[], Any], ...]:
    """Return functions that read the settings, of torch and of others, which one of ``names`` may ask for."""
    return *settings_named(names), *(read for name, read in _READERS.items() if name in names)
