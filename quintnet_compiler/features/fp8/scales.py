"""Largest numbers of blocks that ranks split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...core.sharding import Shard, Sharding
from ...ir.builder import GraphBuilder
from ...ir.program import Axis
from ...ops.collectives import convert
from .ops.scaled_products import block_max

aten = torch.ops.aten


def largest_of_ranks(
    builder: GraphBuilder, x: fx.Node, block: Sequence[int], kinds: Sharding, axes: Sequence[Axis]
) -> fx.Node:
    """Return ``block_max`` of a value that ranks split.

    Each rank takes the largest number of each block of its slice; the ranks gather these, and take the largest. A
    microbatch has its own, as if the model were called with it alone.
    """
    split_blocks = [
        axis
        for axis, kind in zip(axes, kinds, strict=True)
        if isinstance(kind, Shard) and block[kind.dim] == 0 and axis.role != "time"
    ]
    return largest_over(builder, builder.call(block_max, x, list(block)), split_blocks)


def largest_over(builder: GraphBuilder, largest: fx.Node, axes: Sequence[Axis]) -> fx.Node:
    """Return the elementwise maximum over ranks."""
    for axis in reversed(axes):
        row = builder.call(aten.unsqueeze.default, largest, 0)  # a rank may have more or fewer rows than shapes say
        rows = builder.call(convert, row, axis.name, axis.size, "S(0)", "I")
        largest = builder.call(aten.amax.default, rows, [0])
    return largest
