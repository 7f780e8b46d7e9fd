"""How :mod:`.normalize` spells operators that say where in memory elements lie: as a lookup of them.

In a program a value may lie in memory otherwise than in the model, so what strides mean is what they mean in the model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...core.annotations import needs_grad, shape, value
from ...core.errors import CompileError
from ...ir.builder import GraphBuilder

aten = torch.ops.aten


def as_strided(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """as_strided, as_strided_copy of a contiguous tensor. Outer dims that stay as they are remain dims, so that rows
    are read from rows (the windows of stft).

    Raises:
        CompileError: QN105 for other tensors, and for elements outside of the tensor.
    """
    x, sizes, strides, start = _given(builder, node, args, kwargs, first=1)
    kept = _kept(shape(x), sizes, strides, start)
    if kept == len(sizes) == len(shape(x)):
        return x
    places = _places(builder, x, sizes[kept:], strides[kept:], start)
    return builder.call(aten.index.Tensor, _flat(builder, x, kept), [*[None] * kept, places])


def as_strided_scatter(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """A copy of a contiguous tensor, with other elements where the strides say.

    Raises:
        CompileError: QN105 as :func:`as_strided`, and for a tensor with a gradient: autograd gives it the gradient of
            the elements that are replaced, and zero for those that stay (torch 2.13), where memory that is written in
            place has the reverse. A trace does not tell which of both was meant.
    """
    if needs_grad(args[0]):
        raise CompileError(
            "QN105",
            f"{node.target} of a tensor with a gradient: autograd gives it that of the elements that are replaced",
            where=builder.where,
            fix="torch.where, or index_put with the places of the elements",
        )
    x, sizes, strides, start = _given(builder, node, args, kwargs, first=2)
    kept = _kept(shape(x), sizes, strides, start)
    count = math.prod(sizes[kept:])
    places = builder.reshape(_places(builder, x, sizes[kept:], strides[kept:], start), [count])
    source = builder.reshape(args[1], [*sizes[:kept], count])
    written = builder.call(aten.index_copy.default, _flat(builder, x, kept), kept, places, source)
    return builder.reshape(written, shape(x))


def _given(
    builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any], first: int
) -> tuple[fx.Node, list[int], list[int], int]:
    """The tensor, sizes, strides, and where in the tensor the first element lies."""
    names = ("size", "stride", "storage_offset")
    given = dict(zip(names, args[first:], strict=False)) | kwargs
    x, traced = args[0], node.args[0].meta["val"]  # type: ignore[union-attr]
    own, start = traced.storage_offset(), given.get("storage_offset")
    sizes, strides = [int(n) for n in given["size"]], [int(n) for n in given["stride"]]
    if not traced.is_contiguous() or not isinstance(own, int):
        raise CompileError(
            "QN105",
            f"{node.target} of a tensor of shape {list(shape(x))} that is not contiguous: where its elements lie in "
            "memory is not known",
            where=builder.where,
            fix="x.contiguous() before it, or indices",
        )
    start = 0 if start is None else int(start) - own
    last = start + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if not 0 <= start <= last < math.prod(shape(x)):
        raise CompileError(
            "QN105",
            f"{node.target} reads memory outside of its tensor of shape {list(shape(x))}: elements {start} to {last}",
            where=builder.where,
            fix="take the elements from the tensor that they belong to",
        )
    return x, sizes, strides, start


def _kept(dims: tuple[int, ...], sizes: list[int], strides: list[int], start: int) -> int:
    """How many outer dims stay as they are: what follows reads within one element of them."""
    kept = 0
    for dim in range(min(len(dims), len(sizes))):
        block = math.prod(dims[dim + 1 :])
        inner = zip(sizes[dim + 1 :], strides[dim + 1 :], strict=True)
        last = start + sum((n - 1) * stride for n, stride in inner)
        if sizes[dim] != dims[dim] or strides[dim] != block or last >= block:
            break
        kept = dim + 1
    return kept


def _flat(builder: GraphBuilder, x: fx.Node, kept: int) -> fx.Node:
    return builder.reshape(x, [*shape(x)[:kept], math.prod(shape(x)[kept:])])


def _places(builder: GraphBuilder, x: fx.Node, sizes: list[int], strides: list[int], start: int) -> fx.Node:
    """Where in the flat rest of ``x`` each element lies: [*sizes]."""
    kind = {"dtype": torch.int64, "device": value(x).device}
    found = builder.call(aten.full.default, [1] * len(sizes), start, **kind)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = builder.call(aten.mul.Scalar, builder.call(aten.arange.default, size, **kind), stride)
        along = [size if d == dim else 1 for d in range(len(sizes))]
        found = builder.call(aten.add.Tensor, found, builder.reshape(steps, along))
    return found
