"""Decide whether the last dim of a value has stride 1, whatever the strides of a program's leaves are.

Fused attention takes only such queries, keys and values. A fake value has the right strides only where they do not come
from a leaf: a batch may be transposed, and a rank's part of a parameter a slice.
"""

from __future__ import annotations

import torch
from torch import fx

from ...core.annotations import origin, shape, tensor_inputs, value
from ...ops.catalog import op_spec

aten = torch.ops.aten
_MAX_NODES = 1000  # of a search; a longer one gives up


def rows_are_neighbours(node: fx.Node) -> bool:
    """Return whether the last dim of ``node`` certainly has stride 1 at run time."""
    return _even(node) and _strides_hold(node)


def _even(node: fx.Node) -> bool:
    x = value(node)
    return x.dim() == 0 or x.shape[-1] < 2 or x.stride(-1) == 1


def _strides_hold(node: fx.Node) -> bool:
    """Return whether the strides of ``node`` at run time are certainly those of its fake value."""
    todo, seen = [node], {node}
    while todo:
        producer = origin(todo.pop())[0]
        if op_spec(producer).contiguous:
            continue
        if producer.op == "placeholder" or len(seen) > _MAX_NODES:
            return False
        sources = tensor_inputs(producer)
        if op_spec(producer).communicates and not all(map(_even, sources)):
            return False  # fake results are contiguous
        if sources and torch.Tag.pointwise in getattr(producer.target, "tags", ()) and _decides(producer, sources[0]):
            sources = sources[:1]
        todo += [s for s in sources if s not in seen]
        seen.update(sources)
    return True


def _decides(node: fx.Node, first: fx.Node) -> bool:
    """Return whether an elementwise result has the memory order of its first input."""
    x = value(first)
    return shape(first) == shape(node) and all(x.stride(d) for d, size in enumerate(x.shape) if size > 1)
