"""The same call of operands of few elements: sizes, and the numbers among its arguments, in proportion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from ....compat.torch import FakeTensorMode
from ....core.absent_gpu import call_fake
from ....ir.symbolic_sizes import in_example
from .calls import INVALID, OperatorCall
from .operands import elements, nested_strides

MANY = 1 << 17  # where they could be, and are still many, other sizes are tried
SMALL = 8  # sizes up to this one stay


def smaller(call: OperatorCall, mode: FakeTensorMode) -> Iterator[OperatorCall]:
    """The same call of operands of few elements, with its indices and sizes made smaller too. Sizes may be multiples of
    each other by chance: where many elements are left, it comes first with sizes that need not stay so."""
    found = _with_sizes(call, smaller_sizes(call), mode)
    if found is None:
        return
    if elements(found) > MANY and (fewer := _with_sizes(call, smaller_sizes(call, multiples=False), mode)) is not None:
        yield fewer
    yield found


def in_numbers(call: OperatorCall, mode: FakeTensorMode) -> OperatorCall | None:
    """The same call of the sizes that a program's example has; None if no size of it is a symbol."""
    shown: list[bool] = []

    def number(x: Any) -> Any:
        found = in_example(x)
        shown.append(found is not x)
        return found

    def fake(x: Tensor) -> Tensor:
        sizes, strides = ([number(n) for n in given] for given in (x.shape, x.stride()))
        with mode:
            return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)

    operands, tangents = tuple(map(fake, call.operands)), tuple(t if t is None else fake(t) for t in call.tangents)
    made = replace(call, given=map_aggregate(call.given, number), operands=operands, tangents=tangents)
    return made if any(shown) else None


def _with_sizes(call: OperatorCall, sizes: Mapping[int, int], mode: FakeTensorMode) -> OperatorCall | None:
    """None if the operator does not take them, or if nothing would be left of an output."""

    def literal(x: Any) -> Any:
        return (sizes.get(x, x) if x >= 0 else -sizes.get(-x, -x)) if type(x) is int else x

    def fake(like: Tensor, size: Sequence[int]) -> Tensor:
        return torch.empty_strided(size, nested_strides(like, size), dtype=like.dtype, device=like.device)

    args, kwargs = map_aggregate(call.given, literal)
    new = replace(call, given=(args, kwargs))
    with mode:
        operands = [fake(x, [sizes.get(n, n) for n in x.shape]) for x in call.operands]
        filled, named = new.filled(operands)
        try:
            made = call_fake(call.target, filled, named)
        except INVALID:
            return None
        outs = made if isinstance(made, (tuple, list)) else (made,)
        if len(outs) != len(call.tangents):
            return None
        pairs = list(zip(call.tangents, outs, strict=True))
        if any(t is not None and t.numel() and not o.numel() for t, o in pairs):
            return None
        tangents = [None if t is None else fake(t, o.shape) for t, o in pairs]
    return replace(new, operands=tuple(operands), tangents=tuple(tangents))


def smaller_sizes(call: OperatorCall, *, multiples: bool = True) -> dict[int, int]:
    """Smaller numbers for the sizes of a call and the numbers among its arguments. Products and sums of others stay so,
    ``multiples`` where they are told to, and what is smaller than a number among the arguments, or larger, stays that
    where it can: an index stays inside of its dim, and a slice inside of what it is cut from."""
    shapes = [tuple(x.shape) for x in (*call.operands, *call.tangents) if x is not None]
    runs = [shape[i:j] for shape in shapes for i in range(len(shape)) for j in range(i + 2, len(shape) + 1)]
    products = {math.prod(run): run for run in runs}
    sums = {sum(parts): parts for parts in _lists(call.given)}
    real = {n for shape in shapes for n in shape}
    largest = max(real, default=0)
    literals = {n for x in _numbers(call.given) if 0 < (n := abs(x)) < largest}
    made: dict[int, int] = {}

    def less(n: int) -> int:
        return made.get(n, n)

    for size in sorted(n for n in real | literals | products.keys() if n > SMALL):
        run = products.get(size, ())
        fraction = next((n for n in sorted(made, reverse=True) if size % n == 0 and size // n <= SMALL), None)
        part = next((n for n in sorted(literals) if size - n in real | literals), None)
        if size in sums:
            made[size] = sum(less(n) for n in sums[size])
        elif run and max(run) < size:
            made[size] = math.prod(less(n) for n in run)
        elif part is not None:
            made[size] = less(part) + less(size - part)
        elif fraction and multiples:
            made[size] = made[fraction] * (size // fraction)
        else:
            below = [made[n] for n in made if n in literals or (size in literals and n in real)]
            made[size] = max(SMALL + 2 * (1 + len(made)), max(below, default=0) + 2)
    return made


def _numbers(given: Any) -> list[int]:
    """The whole numbers among arguments."""
    found: list[int] = []
    map_aggregate(given, lambda x: found.append(x) if type(x) is int else None)
    return found


def _lists(given: Any) -> Iterator[list[int]]:
    """The lists of two or more numbers among arguments."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        if len(given) > 1 and all(type(x) is int for x in given):
            yield list(given)
        for each in given:
            yield from _lists(each)
