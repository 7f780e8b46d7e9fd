"""Texts of graphs that became code, which torch keeps for tracebacks."""

from __future__ import annotations

import gc
import linecache

import torch
from torch import fx

from quintnet_compiler.compat.torch_codegen import forgotten_texts, goes_with_its_text


def _graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    return graph


def _name(module: fx.GraphModule) -> str:
    return type(module).forward.__code__.co_filename


def test_a_module_takes_its_text_with_it() -> None:
    kept, gone = fx.GraphModule({}, _graph()), goes_with_its_text(fx.GraphModule({}, _graph()))
    names = _name(kept), _name(gone)
    assert all("torch.relu" in "".join(linecache.getlines(name)) for name in names)
    del gone
    gc.collect()
    assert [bool(linecache.getlines(name)) for name in names] == [True, False]


def test_of_traces_no_text_is_kept() -> None:
    before = fx.GraphModule({}, _graph())
    with forgotten_texts():
        inside = fx.GraphModule({}, _graph())
        assert linecache.getlines(_name(inside))
    assert [bool(linecache.getlines(_name(one))) for one in (before, inside)] == [True, False]
    assert inside(torch.tensor(-1.0)) == 0
