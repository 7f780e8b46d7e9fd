"""compiled_state: what objects of compiled classes hold, and whether something was taken of them."""

from __future__ import annotations

import ctypes
import decimal
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree.ElementTree import Element

import numpy
import pytest

from quintnet_compiler.guards.compiled_state import (
    CompiledData,
    IterationState,
    compiled_data,
    is_compiled,
    is_iterator,
    is_pointer,
    objects_held,
)


class OwnError(Exception):
    pass


class Plain:
    pass


def test_which_objects_have_a_compiled_class() -> None:
    assert is_compiled(random.Random(0)) and is_compiled(OwnError(1)) and is_compiled(Element("a"))
    assert not is_compiled(Plain()) and not is_compiled(1.5) and not is_compiled(int) and not is_compiled(decimal)


def test_what_an_exception_holds() -> None:
    error, inner = OwnError([1]), ValueError()
    error.log = []  # type: ignore[attr-defined]
    error.__cause__ = inner
    assert error.args in objects_held(error) and inner in objects_held(error)
    assert vars(error) not in objects_held(error)


def test_the_data_of_a_context() -> None:
    context = decimal.Context(prec=5)
    guard = CompiledData("context", context)
    assert guard.holds() and guard.broken() == []
    context.prec = 6
    assert not guard.holds() and guard.broken() == ["context, a Context, is not in the state that it was"]
    assert compiled_data(Plain()) == ()


def _generator() -> Iterator[int]:
    yield from (1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(1),
        lambda: iter([1, 2]),
        lambda: map(int, "12"),
        lambda: zip([1, 2], [3, 4], strict=True),
        lambda: iter(lambda numbers=itertools.count(): next(numbers), -1),
        _generator,
        lambda: numpy.ones(2).flat,
    ],
)
def test_a_value_is_taken(make: Callable[[], Any]) -> None:
    values = make()
    kept = IterationState.of("values", values)
    assert not kept.has_moved()
    next(values)
    assert kept.has_moved() and str(kept.change()) == f"the state of 'values', a {type(values).__name__}"


def test_a_generator_is_put_back() -> None:
    generator = random.Random(0)
    kept = IterationState.of("generator", generator)
    number = generator.random()
    assert kept.has_moved()
    kept.restore()
    assert not kept.has_moved() and generator.random() == number


def test_iterators_and_pointers() -> None:
    owner = Plain()
    assert is_iterator(iter([])) and not is_iterator(numpy.ones(1).flat) and not is_iterator(weakref.proxy(owner))
    number = ctypes.c_double(1)
    pointers = (ctypes.POINTER(ctypes.c_double) * 1)(ctypes.pointer(number))
    assert is_pointer(ctypes.pointer(number)) and is_pointer(pointers)
    assert not is_pointer(number) and not is_pointer(ctypes.c_void_p())
