"""Sizes that are symbols, and the conditions that code has put on them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import SymInt

from ..compat.torch_symbols import DimDynamic, ShapeEnv, constant_source, enable_python_dispatcher
from ..core.replaced import for_this_thread


def sizes_env(sizes: Mapping[str, Any]) -> ShapeEnv | None:
    """Return the environment of the symbols among ``sizes``, for a FakeTensorMode; None if all are numbers."""
    return next((x.node.shape_env for x in sizes.values() if isinstance(x, SymInt)), None)


def in_example(size: Any) -> Any:
    """Return the number of an expression in its example, without a condition; anything else as it is."""
    return size.node.hint if isinstance(size, SymInt) else size


class SymbolicSizes:
    """Sizes as symbols, each of which also has the number of an example.

    Python code that computes with them gets expressions. Where it branches on one, the answer becomes a condition;
    where it needs the number itself, the condition is that number.

    Attributes:
        example: the number of each size, by name.
        sizes: the symbols, by name.
    """

    def __init__(self, example: Mapping[str, int]) -> None:
        self.example = dict(example)
        self._env = ShapeEnv(duck_shape=False)
        self._symbols: dict[str, Any] = {}
        self._hashed: set[Any] = set()
        self.sizes: dict[str, Any] = {}  # SymInt, where passes are told of numbers
        for name, value in example.items():
            source = constant_source(name)
            symbol = self._env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            size = self._env.create_symintnode(symbol, hint=value, source=source)
            assert isinstance(size, SymInt)
            self._symbols[name], self.sizes[name] = symbol, size

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let expressions be keys (equal ones the same key), while inside.

        Operators in C++ that would ask for numbers are computed by their definitions in Python.
        """

        def key(size: SymInt) -> int:
            expression = size.node.expr
            self._hashed.add(expression)
            return hash(expression)

        hashing = mock.patch.object(SymInt, "__hash__", for_this_thread(key, SymInt.__hash__))
        with warnings.catch_warnings(), hashing, enable_python_dispatcher():
            warnings.filterwarnings("ignore", message="Raw Sym")  # as arguments in a graph
            yield

    @property
    def names(self) -> tuple[str, ...]:
        """Return the symbols' names in text."""
        return tuple(map(str, self._symbols.values()))

    @property
    def open(self) -> bool:
        """Return whether no symbol turned out to be a constant, and nothing has to be asserted while a program runs."""
        return not self._env.replacements and not self._env.deferred_runtime_asserts

    def expression(self, size: SymInt) -> Any:
        """Return a size in the symbols; equal expressions are equal."""
        return size.node.expr

    def conditions(self) -> tuple[Any, ...]:
        """Return the conditions, with the answers for the example."""
        return tuple(guard.expr for guard in self._env.guards)

    def hashed_expressions(self) -> frozenset[Any]:
        """Return the expressions that were keys."""
        return frozenset(self._hashed)

    def conditions_hold(self, numbers: Mapping[str, int]) -> bool:
        """Return whether every condition holds for ``numbers``, too."""
        values = self._values(numbers)
        within = all(
            bounds.lower <= number <= bounds.upper
            for symbol, number in values.items()
            if (bounds := self._env.var_to_range.get(symbol)) is not None
        )
        return within and all(bool(condition.xreplace(values) == True) for condition in self.conditions())  # noqa: E712  sympy's

    def evaluated(self, numbers: Mapping[str, int]) -> Callable[[Any], int]:
        """Return a function that evaluates expressions at ``numbers``."""
        values, results = self._values(numbers), dict[Any, int]()

        def number(expression: Any) -> int:
            if expression not in results:
                result = expression.xreplace(values)
                if not result.is_Integer:
                    raise ValueError(f"{expression} is {result} with {dict(numbers)}")
                results[expression] = int(result)
            return results[expression]

        return number

    def _values(self, numbers: Mapping[str, int]) -> dict[Any, Any]:
        import sympy  # torch has imported it by now, and importing this package should not

        return {symbol: sympy.Integer(numbers[name]) for name, symbol in self._symbols.items()}
