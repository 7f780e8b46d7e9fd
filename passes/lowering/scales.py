"""The largest number of a block of which ranks have parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...core.sharding import Shard, Sharding
from ...ir.builder import GraphBuilder
from ...ir.program import Axis
from ...ops.collectives import convert
from ...ops.scaled_products import block_max

aten = torch.ops.aten


def largest_of_ranks(
    builder: GraphBuilder, x: fx.Node, block: Sequence[int], kinds: Sharding, axes: Sequence[Axis]
) -> fx.Node:
    """``block_max`` of a value of which ranks have slices: each takes the largest of its own, they gather these, one
    number for each block, and take the largest. A microbatch has its own, as if the model were called with it alone."""
    apart = [
        axis
        for axis, kind in zip(axes, kinds, strict=True)
        if isinstance(kind, Shard) and block[kind.dim] == 0 and axis.role != "time"
    ]
    return largest_over(builder, builder.call(block_max, x, list(block)), apart)


def largest_over(builder: GraphBuilder, found: fx.Node, axes: Sequence[Axis]) -> fx.Node:
    """The largest of what each rank has found, number by number."""
    for axis in reversed(axes):
        one = builder.call(aten.unsqueeze.default, found, 0)  # there may be other rows than shapes say
        every = builder.call(convert, one, axis.name, axis.size, "S(0)", "I")
        found = builder.call(aten.amax.default, every, [0])
    return found
