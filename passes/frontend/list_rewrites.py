"""Canonical forms of lists of rows that are joined again, and of rows that a mask puts into others."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ...core.annotations import is_getitem, leaf, origin, shape, tensor_inputs, values
from ...ir.builder import GraphBuilder
from ...ops.catalog import op_spec
from ...ops.filled_rows import alike, fill_rows
from ...ops.rules.node_factors import argument, chosen_dims

aten = torch.ops.aten


def cat(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Return the original of parts that are joined in order (``torch.cat(list(x))``), else emit the operator."""
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    whole = _whole(parts)
    if whole is not None:
        source = tensor_inputs(whole)[0]
        size = shape(source)
        (cut,) = chosen_dims(argument(whole, "dim"), len(size))
        if dim % max(len(shape(parts[0])), 1) == cut:
            if op_spec(whole).splits == "sizes":
                return source
            if cut + 1 < len(size):
                return builder.reshape(source, [*size[:cut], size[cut] * size[cut + 1], *size[cut + 2 :]])
    return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


def _whole(parts: list[fx.Node]) -> fx.Node | None:
    """Return the operator whose results these are, if they are all of them in order."""
    if not parts or not all(map(is_getitem, parts)):
        return None
    first = origin(parts[0])[0]
    every = [(first, index) for index in range(len(values(first)))]
    return first if op_spec(first).splits and [origin(part) for part in parts] == every else None


def row_by_row(builder: GraphBuilder, rows: int, args: list[Any]) -> fx.Node | None:
    """Emit masked_scatter(x, mask, source) so that each of ``rows`` rows is filled by itself, or return None.

    A check comes first: the mask must have as many places in each row as ``source`` has values for it. None if
    ``source`` cannot be divided among the rows, or if the mask depends on parameters, and so cannot be checked before
    microbatches are computed.
    """
    x: fx.Node = args[0]
    mask: fx.Node = args[1]
    source: fx.Node = args[2]
    size = shape(x)
    if 0 in (*size, *shape(source)[:1]) or not shape(source):
        return None
    while mask.target is aten.expand.default:  # the check needs no copies
        (mask,) = tensor_inputs(mask)
    if any(sizes[:1] != (rows,) for sizes in (size, shape(mask))) or len(size) != len(shape(mask)):
        return None
    copies = prod(size) // prod(shape(mask))
    places_per_row = prod(shape(source)) // rows // copies
    if shape(source)[0] % rows or places_per_row * copies * rows != prod(shape(source)):
        return None
    if _depends_on_parameters(mask):
        return None
    checked = builder.call(alike, mask, places_per_row)
    wide = checked if shape(mask) == size else builder.call(aten.expand.default, checked, list(size))
    return builder.call(fill_rows, x, wide, source)


def _depends_on_parameters(node: fx.Node) -> bool:
    todo, seen = [node], {node}
    while todo:
        source = todo.pop()
        source_leaf = leaf(source)
        if source_leaf is not None and source_leaf.kind == "parameter":
            return True
        todo += set(source.all_input_nodes) - seen
        seen.update(source.all_input_nodes)
    return False
