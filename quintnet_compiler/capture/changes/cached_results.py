"""Functions that keep their results, as functools.lru_cache makes them: a trace leaves none of its own in them.

A table of positions may be kept under its size, for instance. What a trace makes is no tensor that the next call of the
module could use, nor another trace. A result that was there before is a constant, as it is for the module.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakSet

from torch import SymBool, SymFloat, SymInt, nn

from ...compat.torch import FakeTensor, FunctionalTensor, pytree
from ...core.replaced import all_objects

_Cached = functools._lru_cache_wrapper
_OF_TRACES = (FakeTensor, FunctionalTensor, SymInt, SymFloat, SymBool)
Made = TypeVar("Made")


@dataclass(frozen=True)
class CachedResults:
    """``missed``: how often each function of this process was computed, before any trace."""

    missed: Mapping[_Cached[Any], int]

    @classmethod
    def of_process(cls) -> CachedResults:
        return cls({x: x.cache_info().misses for x in _FOUND.now()})

    def kept_from(self, trace: Callable[[], Made]) -> Callable[[], Made]:
        """``trace``, after which functions that keep some of its results are as if they had never been called."""

        def traced() -> Made:
            try:
                return trace()
            finally:
                search = _TraceSearch()
                for function, missed in self.missed.items():
                    if function.cache_info().misses != missed and any(map(search.finds, gc.get_referents(function))):
                        function.cache_clear()

        return traced


class _CachedFunctions:
    """The functions of this process that keep their results. A look at all objects takes a tenth of a small compilation
    or more, so there is none where no function was made since the last: each refers to its type, and so ``others``, how
    often anything else refers to it, is what it was."""

    def __init__(self) -> None:
        self.functions: WeakSet[_Cached[Any]] = WeakSet()
        self.others, self.turn = -1, threading.Lock()

    def now(self) -> list[_Cached[Any]]:
        with self.turn:
            before = _references()
            if before - len(self.functions) != self.others or not _counted():
                self.functions = WeakSet(x for x in all_objects() if type(x) is _Cached)
                alone = _references() == before  # no other thread makes or drops some meanwhile
                self.others = before - len(self.functions) if alone else -1
            return list(self.functions)


_FOUND = _CachedFunctions()  # one for the process, as its objects are


def _references() -> int:
    return sys.getrefcount(_Cached)


def _counted() -> bool:
    """Whether functions count as references to their type: not in a Python without a global lock."""
    before = _references()
    made = functools.lru_cache(_references)
    return made.__wrapped__() == before + 1


class _TraceSearch:
    """A search for what is of a trace among what functions keep.

    A cache may hold many thousands of expressions or names: ``plain`` are the types that were seen to have no parts and
    no attributes, so that a second object costs nothing.
    """

    def __init__(self) -> None:
        self.plain: set[type] = set()

    def finds(self, x: Any, *, inside: bool = False) -> bool:
        """Return whether arguments or a result, or a dictionary of these, or attributes of one, are of a trace.

        ``inside``: ``x`` is an attribute, or attributes.
        """
        if isinstance(x, dict):
            return any(self._finds_among(part, inside) for part in [*x, *x.values()])
        return self._finds_among(x, inside)

    def _finds_among(self, x: Any, inside: bool) -> bool:
        if type(x) in self.plain:
            return False
        if type(x) in (tuple, list):  # by far the most: arguments
            return any(self._finds_among(part, inside) for part in x)
        return any(self._is_of_a_trace(leaf, inside) for leaf in pytree.tree_leaves([x]))

    def _is_of_a_trace(self, leaf: Any, inside: bool) -> bool:
        if isinstance(leaf, _OF_TRACES):
            return True
        if _is_code(leaf) or not hasattr(leaf, "__dict__"):
            self.plain.add(type(leaf))
            return False
        return not inside and self.finds(vars(leaf), inside=True)


def _is_code(x: Any) -> bool:
    return isinstance(x, (type, FunctionType, nn.Module))
