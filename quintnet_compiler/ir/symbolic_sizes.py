"""Sizes that are symbols, and everything that was asked about them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import SymInt

from ..compat.torch_symbols import ConstantSource, DimDynamic, ShapeEnv, enable_python_dispatcher
from ..core.replaced import for_this_thread


def sizes_env(sizes: Mapping[str, Any]) -> ShapeEnv | None:
    """What knows the symbols among ``sizes``, for a FakeTensorMode; None if all are numbers."""
    return next((x.node.shape_env for x in sizes.values() if isinstance(x, SymInt)), None)


def in_example(size: Any) -> Any:
    """The number that an expression has in its example, without a question being noted; anything else as it is."""
    return size.node.hint if isinstance(size, SymInt) else size


class SymbolicSizes:
    """Sizes as symbols, each of which also has the number of an example. Python code that computes with them gets
    expressions; where it takes one of two ways because of one, the answer is kept as a condition, and where it needs
    the number itself, the condition is that number. ``sizes``: the symbols by name."""

    def __init__(self, example: Mapping[str, int]) -> None:
        self.example = dict(example)
        self._env = ShapeEnv(duck_shape=False)
        self._symbols: dict[str, Any] = {}
        self._hashed: set[Any] = set()
        self.sizes: dict[str, Any] = {}  # SymInt, where passes are told of numbers
        for name, value in example.items():
            source = ConstantSource(name)
            symbol = self._env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            made = self._env.create_symintnode(symbol, hint=value, source=source)
            assert isinstance(made, SymInt)
            self._symbols[name], self.sizes[name] = symbol, made

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, expressions may be keys, equal ones the same key, and operators in C++ that would ask for numbers
        are computed by their definitions in Python."""

        def key(size: SymInt) -> int:
            found = size.node.expr
            self._hashed.add(found)
            return hash(found)

        ours = mock.patch.object(SymInt, "__hash__", for_this_thread(key, SymInt.__hash__))
        with warnings.catch_warnings(), ours, enable_python_dispatcher():
            warnings.filterwarnings("ignore", message="Raw Sym")  # as arguments in a graph
            yield

    @property
    def names(self) -> tuple[str, ...]:
        """What the symbols are called in text."""
        return tuple(map(str, self._symbols.values()))

    @property
    def open(self) -> bool:
        """Whether no symbol turned out to be one number, and nothing is to be asserted while a program runs."""
        return not self._env.replacements and not self._env.deferred_runtime_asserts

    def expression(self, size: SymInt) -> Any:
        """In the symbols; equal expressions are equal."""
        return size.node.expr

    def conditions(self) -> tuple[Any, ...]:
        """What was asked, with the answers that were given."""
        return tuple(guard.expr for guard in self._env.guards)

    def keys(self) -> frozenset[Any]:
        """Expressions that were keys."""
        return frozenset(self._hashed)

    def hold(self, numbers: Mapping[str, int]) -> bool:
        """Whether every condition is true of ``numbers``, too."""
        given = self._given(numbers)
        within = all(
            bounds.lower <= number <= bounds.upper
            for symbol, number in given.items()
            if (bounds := self._env.var_to_range.get(symbol)) is not None
        )
        return within and all(bool(one.xreplace(given) == True) for one in self.conditions())  # noqa: E712  sympy's

    def evaluated(self, numbers: Mapping[str, int]) -> Callable[[Any], int]:
        """The number of an expression."""
        given, known = self._given(numbers), dict[Any, int]()

        def number(expression: Any) -> int:
            if expression not in known:
                found = expression.xreplace(given)
                if not found.is_Integer:
                    raise ValueError(f"{expression} is {found} with {dict(numbers)}")
                known[expression] = int(found)
            return known[expression]

        return number

    def _given(self, numbers: Mapping[str, int]) -> dict[Any, Any]:
        import sympy  # torch has imported it by now, and importing this package should not

        return {symbol: sympy.Integer(numbers[name]) for name, symbol in self._symbols.items()}
