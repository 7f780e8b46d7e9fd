"""passes.frontend.counted: an index that is its own place looks up each row alone, and computes what torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quintnet_compiler.core.annotations import shape
from quintnet_compiler.ir.builder import GraphBuilder, aten
from quintnet_compiler.passes.frontend.counted.counters import CounterPart, counter
from quintnet_compiler.passes.frontend.counted.rows import CountedRows
from quintnet_compiler.passes.frontend.rewrites import REWRITES

from .graphs import builder, leaf

Indices = list[Any]  # of shapes and builders of indices: an int tensor, None, or what makes a counter


def _arange(to: GraphBuilder, size: int, *more: int) -> fx.Node:
    node = to.call(aten.arange.default, size)
    return to.reshape(node, more) if more else node


def _repeated(to: GraphBuilder, size: int, times: int, each: bool = False) -> fx.Node:
    node = _arange(to, size)
    if each:
        return to.call(aten.repeat_interleave.self_int, node, times, 0)
    return to.reshape(to.call(aten.expand.default, to.reshape(node, [1, size]), [times, size]), [times * size])


A, R = _arange, _repeated
picks = torch.randint
READS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "labels": ((4, 5), [lambda to: A(to, 4), picks(-5, 5, (4,))]),
    "last token": ((4, 5, 3), [lambda to: A(to, 4), picks(-5, 5, (4,))]),
    "several of a row": ((4, 5, 3), [lambda to: A(to, 4, 4, 1), picks(-5, 5, (4, 2))]),
    "rows and positions": ((4, 5, 3), [lambda to: A(to, 4, 4, 1), lambda to: A(to, 5, 1, 5), picks(0, 3, (4, 5))]),
    "two looked up": ((4, 5, 3, 2), [lambda to: A(to, 4), picks(-5, 5, (4,)), picks(-3, 3, (4,))]),
    "two looked up, several": ((4, 5, 3), [lambda to: A(to, 4, 4, 1), picks(-5, 5, (4, 6)), picks(-3, 3, (1, 6))]),
    "columns first": ((5, 4), [picks(0, 5, (4,)), lambda to: A(to, 4)]),
    "second dim": ((2, 4, 5), [None, lambda to: A(to, 4), picks(0, 5, (4,))]),
    "apart": ((4, 3, 5), [lambda to: A(to, 4), None, picks(0, 5, (4,))]),
    "flat": ((12, 5), [lambda to: A(to, 12), picks(0, 5, (12,))]),
    "flat in two dims": ((12, 5), [lambda to: A(to, 12, 4, 3), picks(0, 5, (4, 3))]),
    "repeated": ((4, 3, 5), [lambda to: R(to, 4, 3, each=True), lambda to: R(to, 3, 4), picks(0, 5, (12,))]),
    "alone": ((4, 5), [lambda to: A(to, 4)]),
    "alone, repeated": ((4, 5), [lambda to: R(to, 4, 3, each=True)]),
    "places first": ((4, 5, 3), [lambda to: A(to, 4, 1, 4), picks(-5, 5, (2, 4))]),
}  # fmt: skip


def _call(
    name: str, spelled: Callable[..., fx.Node | None], x: Tensor, *more: Tensor
) -> tuple[Tensor, list[Tensor], list[str]]:
    """What the graph makes of ``x``, its indices as tensors, and its operators."""
    to = builder()
    tensors: list[Tensor] = [x, *more]
    nodes = [leaf(to, "input", f"x{i}", *one.shape, dtype=one.dtype) for i, one in enumerate(tensors)]
    indices: list[Any] = []
    for index in READS[name][1]:
        if isinstance(index, Tensor):
            tensors.append(index)
            nodes.append(leaf(to, "input", f"x{len(nodes)}", *index.shape, dtype=index.dtype))
            indices.append(nodes[-1])
        else:
            indices.append(None if index is None else index(to))
    made = spelled(to, nodes[0], indices, *nodes[1 : 1 + len(more)])
    assert made is not None
    to.graph.output((made, [index for index in indices if index is not None]))
    found, numbers = fx.GraphModule({}, to.graph)(*tensors)
    assert shape(made) == tuple(found.shape)
    rest = iter(numbers)
    every = [None if index is None else next(rest) for index in indices]
    return found, every, [str(n.target) for n in to.graph.nodes if n.op == "call_function"]  # type: ignore[return-value]


def _read(to: GraphBuilder, x: fx.Node, indices: Indices) -> fx.Node | None:
    counted = CountedRows.from_indices(to, x, indices)
    return None if counted is None else counted.read()


@pytest.mark.parametrize("name", READS)
def test_what_is_read(name: str) -> None:
    x = torch.randn(READS[name][0])
    found, indices, made = _call(name, _read, x)
    assert torch.equal(found, torch.ops.aten.index.Tensor(x, indices))
    assert not any("index" in target for target in made)


@pytest.mark.parametrize("adds", [False, True], ids=["put", "add"])
@pytest.mark.parametrize("name", [name for name in READS if name not in ("two looked up, several", "alone, repeated")])
def test_what_is_written(name: str, adds: bool) -> None:
    x = torch.randn(READS[name][0])
    several = name in ("several of a row", "places first")
    _, indices, _ = _call(name, _read, x)
    put = torch.randn(torch.ops.aten.index.Tensor(x, indices).shape)
    put = put[:1].expand_as(put) if several and not adds else put  # which of two that have one place is written is open
    if several and not adds:
        put = torch.full_like(put, 3.0)

    def written(to: GraphBuilder, x: fx.Node, indices: Indices, put: fx.Node) -> fx.Node | None:
        counted = CountedRows.from_indices(to, x, indices)
        return None if counted is None else counted.written(put, adds=adds)

    found, indices, made = _call(name, written, x, put)
    torch.testing.assert_close(found, torch.ops.aten.index_put.default(x, indices, put, adds))
    assert not any("index" in target for target in made)


def test_a_number_is_written_into_all_places() -> None:
    x = torch.randn(4, 5)

    def written(to: GraphBuilder, x: fx.Node, indices: Indices, put: fx.Node) -> fx.Node:
        return REWRITES[aten.index_put.default](
            to, fx.Graph().call_function(aten.index_put.default), [x, indices, put], {}
        )  # type: ignore[return-value]

    found, indices, _ = _call("labels", written, x, torch.tensor(7.0))
    assert torch.equal(found, torch.ops.aten.index_put.default(x, indices, torch.tensor(7.0)))


def _of(to: GraphBuilder, x: fx.Node, *indices: fx.Node | None) -> CountedRows | None:
    return CountedRows.from_indices(to, x, indices)


def test_what_does_not_count_its_dim_is_left_as_it_is() -> None:
    to = builder()
    x, picked = leaf(to, "input", "x", 4, 4), leaf(to, "input", "i", 4, dtype=torch.int64)
    mask = leaf(to, "input", "m", 4, dtype=torch.bool)
    rows = _arange(to, 4)
    assert _of(to, x, picked, picked) is None and _of(to, x, mask) is None
    assert _of(to, x, to.call(aten.arange.start, 1, 5), picked) is None
    assert _of(to, x, to.call(aten.arange.start_step, 0, 8, 2), picked) is None
    assert _of(to, x, to.call(aten.add.Scalar, rows, 0), picked) is None
    assert _of(to, leaf(to, "input", "wide", 5, 4), rows, picked) is None
    several = _of(to, leaf(to, "input", "cube", 4, 4, 4), _arange(to, 4, 4, 1), picked, picked)
    assert several is not None and several.written(leaf(to, "input", "put", 4, 4), adds=True) is None  # one place twice
    again = _of(to, x, to.call(aten.repeat_interleave.self_int, rows, 2, 0))
    assert again is not None and again.written(leaf(to, "input", "put2", 8, 4), adds=False) is None


def test_a_diagonal_counts_rows_once() -> None:
    to = builder()
    rows = _arange(to, 4)
    counted = _of(to, leaf(to, "input", "x", 4, 4), rows, rows)
    assert counted is not None and counted.places.counted == ((0,), None)


def test_digits_of_a_counter() -> None:
    to = builder()
    assert counter(_arange(to, 12), 2) == (CounterPart(1, 1, 12),)
    assert counter(_arange(to, 12, 4, 3), 2) == (CounterPart(0, 1, 4), CounterPart(1, 1, 3))
    assert counter(_repeated(to, 4, 3, each=True), 1) == (CounterPart(0, 3, 4),)
    assert counter(_repeated(to, 4, 3), 1) == (CounterPart(0, 1, 4),)
    assert counter(leaf(to, "input", "x", 4, dtype=torch.int64), 1) is None
