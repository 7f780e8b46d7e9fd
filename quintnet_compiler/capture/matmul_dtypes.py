"""Refuse products of two dtypes: PyTorch refuses them when it computes, but a trace on shapes does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..core.errors import CompileError
from ..ops.rules.work import work_of
from .places import LEAF, WHERE

_aten = torch.ops.aten


def needs_one_dtype(target: Any) -> bool:
    """Return whether PyTorch refuses factors of two dtypes. An einsum promotes those that it only multiplies."""
    return (
        getattr(target, "namespace", "") == "aten"
        and work_of(target) == "matmul"
        and target is not _aten.einsum.default
    )


def check_dtypes(graph: fx.Graph) -> None:
    """Raise CompileError QN101 for a product of tensors of two dtypes in a captured graph."""
    for node in graph.nodes:
        if not needs_one_dtype(node.target):
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes]
        if "transpose" in str(node.target) or not str(node.target).endswith(".default"):
            operands = operands[:2]  # these convolutions convert the bias
        dtypes = list(dict.fromkeys(x.dtype for x in operands if isinstance(x, Tensor)))
        if len(dtypes) > 1:
            input_dtypes = [
                f"batch{leaf.name} is {n.meta['val'].dtype}"
                for n in graph.nodes
                if n.op == "placeholder" and (leaf := n.meta[LEAF]).kind == "input"
                if n.meta["val"].is_floating_point()
            ]
            raise CompileError(
                "QN101",
                f"{node.target} is given {' and '.join(map(str, dtypes))}, and PyTorch computes it in one dtype only"
                + "".join(f"\n  {line}" for line in input_dtypes),
                where=node.meta[WHERE],
            )
