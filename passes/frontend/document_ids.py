"""Ids of packed documents in a graph: their values where those are known, and the lengths that prices expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import annotate, facts, shape
from ...ir.plan import MOST_DOCUMENTS
from ...ir.program import Program
from ...ops.attention.operator import attention
from ...ops.rules.node_factors import argument

CPU = torch.device("cpu")


def known_value(node: fx.Node, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """What ``node`` is, on the host, where all that its value depends on is in the graph or among ``given`` inputs that
    have values; else None."""
    needed, todo = set[fx.Node](), [node]
    while todo:
        here = todo.pop()
        if here.op == "placeholder" and (here not in given or given[here].is_meta):
            return None
        if here not in needed:
            needed.add(here)
            todo += here.all_input_nodes
    env: dict[fx.Node, Any] = {}
    for here in node.graph.nodes:
        if here not in needed:
            continue
        if here.op == "placeholder":
            env[here] = given[here].detach().to(CPU)
            continue
        args, kwargs = fx.map_arg((here.args, here.kwargs), env.__getitem__)
        options = {**kwargs, "device": CPU} if "device" in kwargs else kwargs
        env[here] = here.target(*args, **options)
    found: Tensor = env[node]
    return found


def run_lengths(ids: Tensor) -> list[int]:
    """How long the runs of equal ids [T] are.

    >>> run_lengths(torch.tensor([0, 0, 1, 1, 1, 0]))
    [2, 3, 1]
    """
    changes = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
    return [end - begin for begin, end in pairwise(changes)]


def expect_documents(graph: fx.Graph, lengths: tuple[int, ...]) -> None:
    """Let prices assume documents of these lengths, of attention whose mask has documents (see
    :class:`...core.annotations.Facts`)."""
    for node in _with_documents(graph):
        annotate(node, replace(facts(node), documents=lengths))


def documents_in(program: Program, leaves: Sequence[Any]) -> tuple[int, ...]:
    """The lengths of a batch's documents, row after row, of the attention with the longest rows; () if no mask has
    documents, or if the batch has no values for them, or other sizes. Of many documents those of the first rows.

    ``leaves``: the batch's, in order.
    """
    inputs = [node for node, found in program.leaves.items() if found.kind == "input"]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    masked = sorted(_with_documents(program.graph), key=lambda node: -shape(node)[2])
    if not masked or [shape(node) for node in inputs] != [tuple(x.shape) for x in tensors]:
        return ()
    ids = known_value(_documents_of(masked[0]), dict(zip(inputs, tensors, strict=True)))
    if ids is None:
        return ()
    found: list[int] = []
    for row in ids:
        lengths = run_lengths(row)
        if found and len(found) + len(lengths) > MOST_DOCUMENTS:
            break
        found += lengths
    return tuple(found[:MOST_DOCUMENTS])


def _with_documents(graph: fx.Graph) -> list[fx.Node]:
    nodes = graph.find_nodes(op="call_function", target=attention)
    return [node for node in nodes if argument(node, "segments") is not None]


def _documents_of(node: fx.Node) -> fx.Node:
    ids = argument(node, "segments")
    assert isinstance(ids, fx.Node)
    return ids
