"""Products of two dtypes: PyTorch refuses them when it computes, and a trace on shapes alone does not."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..core.errors import CompileError
from .canonical import LEAF, WHERE

_aten = torch.ops.aten
_PACKETS = (_aten.linear, _aten.matmul, _aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.addbmm, _aten.mv)
_PRODUCTS = frozenset(
    packet.default for packet in (*_PACKETS, _aten.dot, _aten.convolution, _aten.conv1d, _aten.conv2d, _aten.conv3d)
)


def check_dtypes(graph: fx.Graph) -> None:
    """Raises: CompileError QN101 for a product of tensors of two dtypes in a captured graph."""
    for node in graph.nodes:
        if node.target not in _PRODUCTS:
            continue
        operands = [n.meta["val"] for n in node.all_input_nodes]
        dtypes = list(dict.fromkeys(x.dtype for x in operands if isinstance(x, Tensor)))
        if len(dtypes) > 1:
            given = [
                f"batch{found.name} is {n.meta['val'].dtype}"
                for n in graph.nodes
                if n.op == "placeholder" and (found := n.meta[LEAF]).kind == "input"
                if n.meta["val"].is_floating_point()
            ]
            raise CompileError(
                "QN101",
                f"{node.target} is given {' and '.join(map(str, dtypes))}, and PyTorch computes it in one dtype only"
                + "".join(f"\n  {line}" for line in given),
                where=node.meta[WHERE],
            )
