"""Sizes of a traced graph that depend on the values of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..compat.torch import free_unbacked_symbols
from ..core.errors import CompileError, Where
from ..ops.catalog import op_spec

aten = torch.ops.aten


def sizes_of_picks(node: fx.Node) -> set[Any]:
    """Return the symbols of the numbers of rows that a node picks by a mask (:mod:`..passes.frontend.picked_rows`)."""
    by_mask = node.target is aten.index.Tensor and any(
        isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
        for index in node.args[1]  # type: ignore[union-attr]
    )
    return set(free_unbacked_symbols(node.meta["val"])) if by_mask or op_spec(node).finds else set()


def shape_by_value(target: Any, where: Where, why: str = "") -> CompileError:
    """Return an error: nothing can be compiled for such a shape."""
    return CompileError(
        "QN101",
        f"the shape of what {target} returns depends on the values of a tensor" + (f": {why}" if why else ""),
        where=where,
        fix="use a mask (torch.where with three arguments); for a loop over experts, "
        "out = out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x), or quintnet.expert_linear",
    )
