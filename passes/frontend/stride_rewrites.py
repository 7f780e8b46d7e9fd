"""Canonical forms of operators that address elements by strides: lookups by index.

Strides in a program may differ from those in the model, so they are interpreted as in the model.
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
    """Emit as_strided or as_strided_copy of a contiguous tensor as a lookup.

    Outer dims that it leaves as they are remain dims, so that rows are read from rows (as in the windows of stft).

    Raises:
        CompileError: QN105 for other tensors, and for elements outside of the tensor.
    """
    x, sizes, strides, start = _strided_arguments(builder, node, args, kwargs, first=1)
    outer = _unchanged_dims(shape(x), sizes, strides, start)
    if outer == len(sizes) == len(shape(x)):
        return x
    places = _places(builder, x, sizes[outer:], strides[outer:], start)
    return builder.call(aten.index.Tensor, _flat(builder, x, outer), [*[None] * outer, places])


def as_strided_scatter(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a copy of a contiguous tensor with other elements at strided places.

    Raises:
        CompileError: QN105 as :func:`as_strided`, and for a tensor with a gradient: autograd gives it the gradient of
            the elements that are replaced, and zero for those that stay (torch 2.13); a write in place would give the
            reverse. A trace does not tell which of the two was meant.
    """
    if needs_grad(args[0]):
        raise CompileError(
            "QN105",
            f"{node.target} of a tensor with a gradient: autograd gives it that of the elements that are replaced",
            where=builder.where,
            fix="torch.where, or index_put with the places of the elements",
        )
    x, sizes, strides, start = _strided_arguments(builder, node, args, kwargs, first=2)
    outer = _unchanged_dims(shape(x), sizes, strides, start)
    count = math.prod(sizes[outer:])
    places = builder.reshape(_places(builder, x, sizes[outer:], strides[outer:], start), [count])
    source = builder.reshape(args[1], [*sizes[:outer], count])
    written = builder.call(aten.index_copy.default, _flat(builder, x, outer), outer, places, source)
    return builder.reshape(written, shape(x))


def _strided_arguments(
    builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any], first: int
) -> tuple[fx.Node, list[int], list[int], int]:
    """Return the tensor, sizes, strides, and the position of the first element in the tensor."""
    names = ("size", "stride", "storage_offset")
    arguments = dict(zip(names, args[first:], strict=False)) | kwargs
    x, traced = args[0], node.args[0].meta["val"]  # type: ignore[union-attr]
    traced_start, start = traced.storage_offset(), arguments.get("storage_offset")
    sizes, strides = [int(n) for n in arguments["size"]], [int(n) for n in arguments["stride"]]
    if not traced.is_contiguous() or not isinstance(traced_start, int):
        raise CompileError(
            "QN105",
            f"{node.target} of a tensor of shape {list(shape(x))} that is not contiguous: where its elements lie in "
            "memory is not known",
            where=builder.where,
            fix="x.contiguous() before it, or indices",
        )
    start = 0 if start is None else int(start) - traced_start
    last = start + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if not 0 <= start <= last < math.prod(shape(x)):
        raise CompileError(
            "QN105",
            f"{node.target} reads memory outside of its tensor of shape {list(shape(x))}: elements {start} to {last}",
            where=builder.where,
            fix="take the elements from the tensor that they belong to",
        )
    return x, sizes, strides, start


def _unchanged_dims(dims: tuple[int, ...], sizes: list[int], strides: list[int], start: int) -> int:
    """Return the number of outer dims that stay as they are: inner dims read within one element of them."""
    count = 0
    for dim in range(min(len(dims), len(sizes))):
        block = math.prod(dims[dim + 1 :])
        inner = zip(sizes[dim + 1 :], strides[dim + 1 :], strict=True)
        last = start + sum((n - 1) * stride for n, stride in inner)
        if sizes[dim] != dims[dim] or strides[dim] != block or last >= block:
            break
        count = dim + 1
    return count


def _flat(builder: GraphBuilder, x: fx.Node, outer: int) -> fx.Node:
    return builder.reshape(x, [*shape(x)[:outer], math.prod(shape(x)[outer:])])


def _places(builder: GraphBuilder, x: fx.Node, sizes: list[int], strides: list[int], start: int) -> fx.Node:
    """Return the positions of the elements in the flattened inner dims of ``x``, [*sizes]."""
    options = {"dtype": torch.int64, "device": value(x).device}
    positions = builder.call(aten.full.default, [1] * len(sizes), start, **options)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = builder.call(aten.mul.Scalar, builder.call(aten.arange.default, size, **options), stride)
        along = [size if d == dim else 1 for d in range(len(sizes))]
        positions = builder.call(aten.add.Tensor, positions, builder.reshape(steps, along))
    return positions
