"""ir.value_numbers: values that are made alike have one number."""

from __future__ import annotations

from torch import fx

from quintnet_compiler.ir.value_numbers import ValueNumbers


def test_calls_of_equal_values_have_one_number() -> None:
    numbers, graph = ValueNumbers(), fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    of = {x: 10, y: 10, z: 11}.__getitem__
    one = numbers.call("forward", "add", ((x, [z, 2]), {}), of)
    assert numbers.call("forward", "add", ((y, [z, 2]), {}), of) == one
    others = [("backward", "add", ((x, [z, 2]), {})), ("forward", "mul", ((x, [z, 2]), {}))]
    others += [("forward", "add", ((z, [x, 2]), {})), ("forward", "add", ((x, [z, 3]), {}))]
    assert len({one, *(numbers.call(*each, of) for each in others)}) == 5
    assert numbers.number("call") != numbers.number("leaf") and numbers.number("leaf") == numbers.number("leaf")
