"""Sizes of products that are fused with collectives."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ...core.annotations import shape, values
from ...cost_models.operators import ProductSize


def all_gather_matmul_size(node: fx.Node) -> ProductSize:
    """Return the size of one product for each slice that travels, with all weights concatenated."""
    args: Any = node.args
    x, size, results = shape(args[0]), args[2], values(node)[: len(args[5])]
    return size, math.prod(x[:-1]), sum(value.shape[-1] for value in results), x[-1]


def matmul_reduce_scatter_size(node: fx.Node) -> ProductSize:
    """Return the size of one product for each slice that travels, with all terms concatenated."""
    args: Any = node.args
    out = shape(node)
    return args[2], math.prod(out[:-1]), out[-1], sum(shape(x)[-1] for x in args[0])
