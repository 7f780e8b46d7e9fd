"""Canonical form of convolutions in which each row has its own filters, such as ``torch.vmap`` of a convolution.

The number of groups, which is the number of rows or a multiple of it, becomes the size of a dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape
from ...ir.builder import GraphBuilder
from ...ops.filters_of_rows import grouped_convolution
from ...ops.rules.node_factors import arguments

aten = torch.ops.aten


def convolution(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Convolve each group by itself if groups may stand for rows, else leave the operator as it is.

    They may if their number is symbolic, or if there is one image with many groups.
    """
    symbolic, concrete = arguments(node.target, node.args, node.kwargs), arguments(node.target, args, kwargs)
    x, weight, bias, groups = args[0], args[1], concrete["bias"], concrete["groups"]
    images, filters = shape(x), shape(weight)
    dims = len(filters) - 2
    of_rows = isinstance(symbolic["groups"], fx.Node) or (images[0] == 1 and groups > 1)
    if not of_rows or len(images) != dims + 2:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    out = builder.call(
        grouped_convolution,
        builder.reshape(x, [images[0], groups, images[1] // groups, *images[2:]]),
        builder.reshape(weight, [groups, filters[0] // groups, *filters[1:]]),
        *(_each(concrete[name], dims) for name in ("stride", "padding", "dilation")),
        "conv_transpose" in str(node.target) or bool(concrete.get("transposed", False)),
        _each(concrete.get("output_padding", 0), dims),
    )
    if bias is not None:
        out = builder.call(aten.add.Tensor, out, builder.reshape(bias, [groups, shape(out)[2], *[1] * dims]))
    return builder.reshape(out, [images[0], groups * shape(out)[2], *shape(out)[3:]])


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    """Return an option of a convolution for each dim of space."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


CONVOLUTIONS = (
    aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
)  # fmt: skip
