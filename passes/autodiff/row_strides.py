"""Whether the elements of a value's rows are neighbours in memory, whatever memory the leaves of a program lie in.

Fused attention takes such queries, keys and values alone. Shapes tell their strides only where strides do not come from
a leaf: a batch may be transposed, and a rank's part of a parameter a slice.
"""

from __future__ import annotations

import torch
from torch import fx

from ...core.annotations import origin, shape, tensor_inputs, value
from ...ops.catalog import op_spec

aten = torch.ops.aten
_FURTHEST = 1000  # nodes that are looked at; behind them nothing is taken for granted


def rows_are_neighbours(node: fx.Node) -> bool:
    """Whether the last dim of ``node`` surely has stride 1 where there are tensors."""
    return _even(node) and _strides_hold(node)


def _even(node: fx.Node) -> bool:
    x = value(node)
    return x.dim() == 0 or x.shape[-1] < 2 or x.stride(-1) == 1


def _strides_hold(node: fx.Node) -> bool:
    """Whether the strides of ``node`` surely are those of its fake value."""
    todo, seen = [node], {node}
    while todo:
        made = origin(todo.pop())[0]
        if op_spec(made).contiguous:
            continue
        if made.op == "placeholder" or len(seen) > _FURTHEST:
            return False
        sources = tensor_inputs(made)
        if op_spec(made).communicates and not all(map(_even, sources)):
            return False  # fake results are contiguous
        if sources and torch.Tag.pointwise in getattr(made.target, "tags", ()) and _decides(made, sources[0]):
            sources = sources[:1]
        todo += [s for s in sources if s not in seen]
        seen.update(sources)
    return True


def _decides(node: fx.Node, first: fx.Node) -> bool:
    """Whether the order of dims in the memory of an elementwise result is that of its first input."""
    x = value(first)
    return shape(first) == shape(node) and all(x.stride(d) for d, size in enumerate(x.shape) if size > 1)
