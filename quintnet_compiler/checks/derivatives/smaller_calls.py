"""Smaller calls of an operator: sizes, and the numbers among its arguments, are reduced in proportion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from ...compat.torch import FakeTensorMode
from ...core.absent_gpu import call_fake
from ...ir.symbolic_sizes import in_example
from .calls import INVALID, OperatorCall
from .operands import elements, nested_strides

MAX_SMALL_ELEMENTS = 1 << 17  # of a smaller call; where it has more, sizes need not stay multiples
MAX_KEPT_SIZE = 8  # larger sizes are reduced


def smaller(call: OperatorCall, mode: FakeTensorMode) -> Iterator[OperatorCall]:
    """Yield the same call with smaller operands, indices and sizes.

    Sizes may be multiples of each other by chance: if many elements remain, the first call has sizes that need not be.
    """
    small = _with_sizes(call, smaller_sizes(call), mode)
    if small is None:
        return
    if elements(small) > MAX_SMALL_ELEMENTS:
        smallest = _with_sizes(call, smaller_sizes(call, multiples=False), mode)
        if smallest is not None:
            yield smallest
    yield small


def in_numbers(call: OperatorCall, mode: FakeTensorMode) -> OperatorCall | None:
    """Return the same call with the sizes of the program's example, or None if no size of it is a symbol."""
    was_symbol: list[bool] = []

    def number(x: Any) -> Any:
        size = in_example(x)
        was_symbol.append(size is not x)
        return size

    def fake(x: Tensor) -> Tensor:
        sizes, strides = [number(n) for n in x.shape], [number(n) for n in x.stride()]
        with mode:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)

    operands, tangents = tuple(map(fake, call.operands)), tuple(t if t is None else fake(t) for t in call.tangents)
    arguments = map_aggregate(call.arguments, number)
    example = replace(call, arguments=arguments, operands=operands, tangents=tangents)
    return example if any(was_symbol) else None


def _with_sizes(call: OperatorCall, sizes: Mapping[int, int], mode: FakeTensorMode) -> OperatorCall | None:
    """Return the call with other sizes, or None if the operator rejects them or an output would be empty."""

    def literal(x: Any) -> Any:
        return (sizes.get(x, x) if x >= 0 else -sizes.get(-x, -x)) if type(x) is int else x

    def fake(like: Tensor, size: Sequence[int]) -> Tensor:
        return torch.empty_strided(size, nested_strides(like, size), dtype=like.dtype, device=like.device)

    args, kwargs = map_aggregate(call.arguments, literal)
    small = replace(call, arguments=(args, kwargs))
    with mode:
        operands = [fake(x, [sizes.get(n, n) for n in x.shape]) for x in call.operands]
        filled, named = small.with_operands(operands)
        try:
            result = call_fake(call.target, filled, named)
        except INVALID:
            return None
        outs = result if isinstance(result, (tuple, list)) else (result,)
        if len(outs) != len(call.tangents):
            return None
        pairs = list(zip(call.tangents, outs, strict=True))
        if any(t is not None and t.numel() and not o.numel() for t, o in pairs):
            return None
        tangents = [None if t is None else fake(t, o.shape) for t, o in pairs]
    return replace(small, operands=tuple(operands), tangents=tuple(tangents))


def smaller_sizes(call: OperatorCall, *, multiples: bool = True) -> dict[int, int]:
    """Return smaller numbers for the sizes of a call and the numbers among its arguments.

    Products and sums of sizes stay products and sums, and multiples stay multiples if ``multiples``. The order of
    sizes and arguments is kept where possible: an index stays inside of its dim, and a slice inside of its source.
    """
    return _Reduction(call).reduced_numbers(multiples)


class _Reduction:
    """The numbers of a call, and how they depend on each other.

    Attributes:
        sizes: of the dims of operands and tangents.
        literals: numbers among the arguments that are smaller than the largest size.
        products: for a product of neighbouring dims, their sizes.
        sums: for a sum of a list among the arguments, its numbers.
        smaller: for each number that was reduced, the smaller one.
    """

    def __init__(self, call: OperatorCall) -> None:
        shapes = [tuple(x.shape) for x in (*call.operands, *call.tangents) if x is not None]
        self.sizes = {n for shape in shapes for n in shape}
        largest = max(self.sizes, default=0)
        self.literals = {n for x in _numbers(call.arguments) if 0 < (n := abs(x)) < largest}
        self.products = {math.prod(dims): dims for shape in shapes for dims in _neighbours(shape)}
        self.sums = {sum(terms): terms for terms in _lists(call.arguments)}
        self.smaller: dict[int, int] = {}

    def reduced_numbers(self, multiples: bool) -> dict[int, int]:
        """Return a smaller number for each number, from the smallest on."""
        candidates = self.sizes | self.literals | self.products.keys()
        for number in sorted(n for n in candidates if n > MAX_KEPT_SIZE):
            self.smaller[number] = self._reduced(number, multiples)
        return self.smaller

    def _reduced(self, number: int, multiples: bool) -> int:
        if number in self.sums:
            return sum(map(self._now, self.sums[number]))
        dims = self.products.get(number, ())
        if dims and max(dims) < number:
            return math.prod(map(self._now, dims))
        term = next((n for n in sorted(self.literals) if number - n in self.sizes | self.literals), None)
        if term is not None:
            return self._now(term) + self._now(number - term)
        divisor = self._divisor(number) if multiples else None
        if divisor is not None:
            return self.smaller[divisor] * (number // divisor)
        return max(MAX_KEPT_SIZE + 2 * (1 + len(self.smaller)), self._largest_below(number) + 2)

    def _now(self, number: int) -> int:
        return self.smaller.get(number, number)

    def _divisor(self, number: int) -> int | None:
        """Return the largest reduced number that ``number`` is a small multiple of."""
        divisors = (n for n in sorted(self.smaller, reverse=True) if number % n == 0)
        return next((n for n in divisors if number // n <= MAX_KEPT_SIZE), None)

    def _largest_below(self, number: int) -> int:
        """Return the largest of the reduced numbers that must stay below ``number``."""
        is_literal = number in self.literals
        below = [small for n, small in self.smaller.items() if n in self.literals or (is_literal and n in self.sizes)]
        return max(below, default=0)


def _neighbours(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of each two or more dims in a row."""
    for start in range(len(shape)):
        for end in range(start + 2, len(shape) + 1):
            yield shape[start:end]


def _numbers(arguments: Any) -> list[int]:
    """Return the whole numbers among arguments."""
    numbers: list[int] = []
    map_aggregate(arguments, lambda x: numbers.append(x) if type(x) is int else None)
    return numbers


def _lists(arguments: Any) -> Iterator[list[int]]:
    """Yield the lists of two or more numbers among arguments."""
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        if len(arguments) > 1 and all(type(x) is int for x in arguments):
            yield list(arguments)
        for argument in arguments:
            yield from _lists(argument)
