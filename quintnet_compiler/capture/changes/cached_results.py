"""Clear functions with functools.lru_cache that keep results of a trace.

A table of positions may be cached by its size, for instance. A tensor of a trace is of no use to the next call of the
module, nor to another trace. A result that was cached before the trace is a constant, as it is for the module.
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
Result = TypeVar("Result")


@dataclass(frozen=True)
class CachedResults:
    """The number of cache misses of each cached function of this process (``missed``), before a trace."""

    missed: Mapping[_Cached[Any], int]

    @classmethod
    def of_process(cls) -> CachedResults:
        return cls({x: x.cache_info().misses for x in _FOUND.current_functions()})

    def kept_from(self, trace: Callable[[], Result]) -> Callable[[], Result]:
        """Return ``trace``, extended to clear functions that keep some of its results."""

        def traced() -> Result:
            try:
                return trace()
            finally:
                search = _TraceSearch()
                for function, missed in self.missed.items():
                    if function.cache_info().misses != missed and any(map(search.finds, gc.get_referents(function))):
                        function.cache_clear()

        return traced


class _CachedFunctions:
    """The cached functions of this process.

    A search among all objects takes a tenth of a small compilation or more, so it is skipped if no such function was
    made since the last. Each refers to its type; ``others``: the number of other references to the type, which is then
    the same.
    """

    def __init__(self) -> None:
        self.functions: WeakSet[_Cached[Any]] = WeakSet()
        self.others, self.turn = -1, threading.Lock()

    def current_functions(self) -> list[_Cached[Any]]:
        with self.turn:
            references = _references()
            if references - len(self.functions) != self.others or not _counted():
                self.functions = WeakSet(x for x in all_objects() if type(x) is _Cached)
                alone = _references() == references  # no other thread makes or drops some meanwhile
                self.others = references - len(self.functions) if alone else -1
            return list(self.functions)


_FOUND = _CachedFunctions()  # one for the process, as its objects are


def _references() -> int:
    return sys.getrefcount(_Cached)


def _counted() -> bool:
    """Return whether functions count as references to their type: not in a Python without a global lock."""
    references = _references()
    cached = functools.lru_cache(_references)
    return cached.__wrapped__() == references + 1


class _TraceSearch:
    """A search for objects of a trace in caches.

    A cache may hold many thousands of expressions or names: ``plain`` has the types that have neither parts nor
    attributes, so that a second object of one costs nothing.
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
