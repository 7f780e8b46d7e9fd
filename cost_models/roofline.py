"""Time of one operator: the longer of its arithmetic and its memory traffic; of a collective: alpha-beta."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..annotations import facts, needs_grad, num_bytes, shape, tensor_inputs, values
from ..attention_ops import attention
from ..expert_ops import expert_linear
from .hardware import H100, Hardware

aten = torch.ops.aten


def _matmul_flops(node: fx.Node) -> float:
    return 2.0 * math.prod(shape(node)) * shape(tensor_inputs(node)[0])[-1]


def _attention_flops(node: fx.Node) -> float:
    query, key, value_ = tensor_inputs(node)[:3]
    causal = 0.5 if node.kwargs.get("causal") or (len(node.args) > 5 and node.args[5]) else 1.0
    return causal * 2.0 * math.prod(shape(query)[:-1]) * shape(key)[-2] * (shape(query)[-1] + shape(value_)[-1])


def _convolution_flops(node: fx.Node) -> float:
    return 2.0 * math.prod(shape(node)) * math.prod(shape(tensor_inputs(node)[1])[1:])


# Multiply-adds count 2. Every other operator is bound by memory.
FLOPS: dict[Any, Callable[[fx.Node], float]] = {
    **dict.fromkeys([aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default], _matmul_flops),
    expert_linear: _matmul_flops,
    aten.addmm.default: lambda node: 2.0 * math.prod(shape(node)) * shape(tensor_inputs(node)[1])[-1],
    **dict.fromkeys([aten.scaled_dot_product_attention.default, attention], _attention_flops),
    **dict.fromkeys(
        [aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default], _convolution_flops
    ),
}
# Views move nothing.
VIEWS = frozenset(
    {
        aten.reshape.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
        aten.slice.Tensor, aten.select.int, aten.split_with_sizes.default, aten.detach.default,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """Prices for one kind of hardware (Williams et al. 2009; collectives after Thakur et al. 2005, ring)."""

    hardware: Hardware = H100

    def flops(self, node: fx.Node) -> float:
        """Arithmetic of the unsplit operator's forward pass."""
        count = FLOPS.get(node.target)
        return count(node) if count else 0.0

    def operator_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or node.target in VIEWS:
            return 0.0
        moved = sum(num_bytes(v) for v in values(node))
        for source in tensor_inputs(node):
            found = facts(source).value
            moved += num_bytes(found) if isinstance(found, torch.Tensor) else 0
        hw = self.hardware
        forward = max(self.flops(node) / (hw.flops_per_second * hw.efficiency), moved / hw.memory_bytes_per_second)
        return forward * (3.0 if needs_grad(node) else 1.0)  # the backward pass of a matmul is two matmuls

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        hw = self.hardware
        if name in ("shard_slice", "shard_pad"):  # no communication: read and write one part
            return 2 * num_bytes / ranks / hw.memory_bytes_per_second
        share = num_bytes * (ranks - 1) / ranks
        volume = {
            "all_reduce": 2 * share,
            "all_gather": share,
            "reduce_scatter": share,
            "all_to_all": share / ranks,
            "send": num_bytes,
        }[name]
        return volume / hw.link_bytes_per_second

    def parameter_seconds(self, num_bytes: float) -> float:
        # AdamW reads gradient, parameter and two moments and writes three of them
        return 7 * num_bytes / self.hardware.memory_bytes_per_second
