"""How :mod:`.normalize` spells lists of rows that are joined again, and rows that a mask puts into others."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ...core.annotations import is_getitem, leaf, origin, shape, tensor_inputs, values
from ...ir.builder import GraphBuilder
from ...ops.filled_rows import alike, fill_rows
from ...ops.rules.node_factors import argument, chosen_dims

aten = torch.ops.aten


def cat(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """What was taken apart and is joined in the same order is what it was: ``torch.cat(list(x))``."""
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    whole = _whole(parts)
    if whole is not None:
        source = tensor_inputs(whole)[0]
        size = shape(source)
        (cut,) = chosen_dims(argument(whole, "dim"), len(size))
        if dim % max(len(shape(parts[0])), 1) == cut:
            if whole.target is aten.split_with_sizes.default:
                return source
            if cut + 1 < len(size):
                return builder.reshape(source, [*size[:cut], size[cut] * size[cut + 1], *size[cut + 2 :]])
    return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


def _whole(parts: list[fx.Node]) -> fx.Node | None:
    """The operator of which these are all results, in order."""
    if not parts or not all(map(is_getitem, parts)):
        return None
    first = origin(parts[0])[0]
    every = [(first, index) for index in range(len(values(first)))]
    apart = first.target in (aten.unbind.int, aten.split_with_sizes.default)
    return first if apart and [origin(part) for part in parts] == every else None


def row_by_row(builder: GraphBuilder, rows: int, args: list[Any]) -> fx.Node | None:
    """masked_scatter(x, mask, source) of a batch of so many ``rows`` that is computed in parts: each row on its own,
    behind a check that the mask has as many places in each row as there is to fill them. None where a row has no share
    of ``source``, or where the mask depends on parameters and is not known before the parts are computed."""
    x: fx.Node = args[0]
    mask: fx.Node = args[1]
    source: fx.Node = args[2]
    size = shape(x)
    if 0 in (*size, *shape(source)[:1]) or not shape(source):
        return None
    while mask.target is aten.expand.default:  # of which the check needs no copies
        (mask,) = tensor_inputs(mask)
    if any(found[:1] != (rows,) for found in (size, shape(mask))) or len(size) != len(shape(mask)):
        return None
    copies = prod(size) // prod(shape(mask))
    many = prod(shape(source)) // rows // copies
    if shape(source)[0] % rows or many * copies * rows != prod(shape(source)):
        return None
    if _of_parameters(mask):
        return None
    checked = builder.call(alike, mask, many)
    wide = checked if shape(mask) == size else builder.call(aten.expand.default, checked, list(size))
    return builder.call(fill_rows, x, wide, source)


def _of_parameters(node: fx.Node) -> bool:
    found, seen = [node], {node}
    while found:
        one = found.pop()
        known = leaf(one)
        if known is not None and known.kind == "parameter":
            return True
        found += set(one.all_input_nodes) - seen
        seen.update(one.all_input_nodes)
    return False
