"""The largest number of a block of which ranks have parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...core.annotations import shape
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
    found = builder.call(block_max, x, list(block))
    for axis, kind in reversed(list(zip(axes, kinds, strict=True))):
        if isinstance(kind, Shard) and block[kind.dim] == 0 and axis.role != "time":
            one = builder.reshape(found, [1, *shape(found)])
            every = builder.call(convert, one, axis.name, axis.size, "S(0)", "I")
            found = builder.call(aten.amax.default, every, [0])
    return found
