"""Ids of packed documents in a graph: their values if they can be computed, and the lengths that prices expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from ...core.annotations import annotate, facts, shape
from ...ir.expectations import MOST_DOCUMENTS
from ...ir.program import Program
from ...ops.attention.operator import attention
from ...ops.rules.node_factors import argument

CPU = torch.device("cpu")


def known_value(node: fx.Node, inputs: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """Return the value of ``node``, on the host, or None if it depends on a placeholder without a value.

    ``inputs``: the values of placeholders; tensors on the meta device have none.
    """
    needed, todo = set[fx.Node](), [node]
    while todo:
        source = todo.pop()
        if source.op == "placeholder" and (source not in inputs or inputs[source].is_meta):
            return None
        if source not in needed:
            needed.add(source)
            todo += source.all_input_nodes
    env: dict[fx.Node, Any] = {}
    for source in node.graph.nodes:
        if source not in needed:
            continue
        if source.op == "placeholder":
            env[source] = inputs[source].detach().to(CPU)
            continue
        args, kwargs = fx.map_arg((source.args, source.kwargs), env.__getitem__)
        options = {**kwargs, "device": CPU} if "device" in kwargs else kwargs
        env[source] = source.target(*args, **options)
    result: Tensor = env[node]
    return result


def run_lengths(ids: Tensor) -> list[int]:
    """Return the lengths of the runs of equal ids [T].

    >>> run_lengths(torch.tensor([0, 0, 1, 1, 1, 0]))
    [2, 3, 1]
    """
    changes = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist(), len(ids)]
    return [end - begin for begin, end in pairwise(changes)]


def expect_documents(graph: fx.Graph, lengths: tuple[int, ...]) -> None:
    """Annotate attention over documents with these lengths, for prices (:class:`...core.annotations.Facts`)."""
    for node in _with_documents(graph):
        annotate(node, replace(facts(node), documents=lengths))


def documents_in(program: Program, leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the lengths of a batch's documents, row by row, for the attention with the longest rows.

    Empty if no mask has documents, or if the batch has other sizes or no values for them. At most ``MOST_DOCUMENTS``
    lengths are returned, those of the first rows.

    ``leaves``: of the batch, in order.
    """
    inputs = [node for node, stored in program.leaves.items() if stored.kind == "input"]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    masked = sorted(_with_documents(program.graph), key=lambda node: -shape(node)[2])
    if not masked or [shape(node) for node in inputs] != [tuple(x.shape) for x in tensors]:
        return ()
    ids = known_value(_documents_of(masked[0]), dict(zip(inputs, tensors, strict=True)))
    if ids is None:
        return ()
    lengths: list[int] = []
    for row in ids:
        row_lengths = run_lengths(row)
        if lengths and len(lengths) + len(row_lengths) > MOST_DOCUMENTS:
            break
        lengths += row_lengths
    return tuple(lengths[:MOST_DOCUMENTS])


def _with_documents(graph: fx.Graph) -> list[fx.Node]:
    nodes = graph.find_nodes(op="call_function", target=attention)
    return [node for node in nodes if argument(node, "segments") is not None]


def _documents_of(node: fx.Node) -> fx.Node:
    ids = argument(node, "segments")
    assert isinstance(ids, fx.Node)
    return ids
