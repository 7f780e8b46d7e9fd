"""Functions that are known are not run again: their results look the same, in memory that is shared in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from quintnet_compiler.compat.torch import storage_key
from quintnet_compiler.simulation.known_functions import KnownFunctions, Peaks

aten = torch.ops.aten
PEAKS: Peaks = (128, ((64, 0), (32, 16)))


def _function(names: Sequence[str], site: int) -> fx.Graph:
    """A view of the first argument, a new value, a view of it, and a method of the rank whose site is no part of it."""
    graph = fx.Graph()
    comm, x, y = (graph.placeholder(name) for name in ("comm", *names))
    part = graph.call_function(aten.slice.Tensor, (x, 0, 1, 3))
    new = graph.call_function(aten.mul.Tensor, (x, y))
    moved = graph.call_method("all_reduce", (comm, new, "dp", site))
    graph.output((part, new, graph.call_function(aten.t.default, (new,)), moved))
    return graph


def _run(graph: fx.Graph, given: Sequence[Tensor], ran: list[str]) -> tuple[tuple[Tensor, ...], Peaks]:
    ran.append(str(graph.output_node().args))
    x, y = given
    new = x * y
    return (x[1:3], new, new.t(), new.clone()), PEAKS


def _looks(given: Sequence[Tensor], made: Sequence[Tensor]) -> list[object]:
    places: dict[int, int] = {}
    return [
        (x.shape, x.stride(), x.storage_offset(), x.dtype, places.setdefault(storage_key(x), len(places)))
        for x in (*given, *made)
    ]


def _pair(rows: int) -> list[Tensor]:
    return [torch.empty(rows, 4, device="meta") for _ in range(2)]


def test_a_function_with_other_names_and_sites_is_known() -> None:
    known, ran = KnownFunctions({}, (), lambda name: False), list[str]()
    first, second = _pair(4), _pair(4)
    a, b = _function(["x", "y"], 3), _function(["u", "v"], 7)
    made, peaks = known.run_once(a, first, [first[0]], (), None, lambda: _run(a, first, ran))
    again, same = known.run_once(b, second, [second[0]], (), None, lambda: _run(b, second, ran))
    assert len(ran) == 1 and peaks == same == PEAKS
    assert _looks(first, made) == _looks(second, again)
    assert not {storage_key(x) for x in (*first, *made)} & {storage_key(x) for x in (*second, *again)}


def test_what_a_function_depends_on_tells_it_apart() -> None:
    results: dict[object, object] = {}
    ran, graph, given = list[str](), _function(["x", "y"], 0), _pair(4)
    cases = [
        (KnownFunctions(results, (), lambda name: False), given, [given[0]]),
        (KnownFunctions(results, (("dp", 2),), lambda name: False), given, [given[0]]),  # another place
        (KnownFunctions(results, (), lambda name: False), given, given),  # other arguments are kept
        (KnownFunctions(results, (), lambda name: False), _pair(8), [given[0]]),  # other shapes
        (KnownFunctions(results, (), lambda name: False), given, [given[0]], given[1]),  # an argument lies on the host
        (
            KnownFunctions(results, (), lambda name: False),
            [given[0], given[0]],
            [given[0]],
        ),  # two arguments that are one
    ]
    for known, some, lent, *away in cases:
        known.run_once(graph, some, lent, tuple(away), None, lambda some=some: _run(graph, some, ran))  # type: ignore[misc]
    assert len(ran) == len(cases)
