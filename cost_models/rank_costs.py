"""What one rank's own nodes cost on a kind of hardware: a roofline per node, latencies on the links."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor, fx

from ..annotations import facts, is_getitem, num_bytes, shape, tensor_inputs, values
from ..comm_ops import ring_attention, ring_attention_backward
from .hardware import H100, Hardware
from .roofline import VIEWS, Roofline, aten

FLASH = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
FLASH_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)


def attention_flops(node: fx.Node) -> float:
    """Arithmetic of an attention kernel, forward or backward; causal ones see half of the keys.

    The backward has five products where the forward has two (Dao et al. 2022).
    """
    backward = node.target in FLASH_BACKWARD or node.target is ring_attention_backward
    query, key, value = tensor_inputs(node)[backward : backward + 3]
    if node.target in (ring_attention, ring_attention_backward):
        # (q, axis, size, k, v, ...) and (grad, axis, size, q, k, v, ...)
        keys = shape(key)[2] * int(node.args[2])  # type: ignore[arg-type]
        causal = bool(node.args[-3])
    else:
        keys = shape(key)[2]
        causal = any(arg is True for arg in (*node.args, *node.kwargs.values()))
    count = 2.0 * math.prod(shape(query)[:-1]) * keys * (shape(query)[-1] + shape(value)[-1])
    return count * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)


def is_attention(node: fx.Node) -> bool:
    return node.target in FLASH | FLASH_BACKWARD or node.target in (ring_attention, ring_attention_backward)


def moved_bytes(node: fx.Node) -> int:
    """What a node reads and writes."""
    found = sum(num_bytes(v) for v in values(node) if isinstance(v, Tensor))
    for source in tensor_inputs(node):
        made = facts(source).value
        found += num_bytes(made) if isinstance(made, Tensor) else 0
    return found


@dataclass(frozen=True)
class RooflineCosts:
    """:class:`..cost.RankCosts` of accelerators on links of equal speed.

    ``launch_seconds``: the shortest time of a kernel; ``link_seconds``: of a message. Both are typical of NVIDIA GPUs:
    a kernel takes 3 to 5 microseconds from launch to end, NCCL 10 and more between two of them.
    """

    hardware: Hardware = H100
    launch_seconds: float = 3e-6
    link_seconds: float = 1e-5
    overlaps: bool = True
    cores: int | None = None
    roofline: Roofline = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "roofline", Roofline(self.hardware))

    @property
    def action_seconds(self) -> float:
        return 0.0

    def node_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or node.target in VIEWS or is_getitem(node):
            return 0.0
        flops = attention_flops(node) if is_attention(node) else self.roofline.flops(node)
        hw = self.hardware
        busy = max(flops / (hw.flops_per_second * hw.efficiency), moved_bytes(node) / hw.memory_bytes_per_second)
        return max(self.launch_seconds, busy)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return max(self.launch_seconds, 3 * num_bytes / self.hardware.memory_bytes_per_second)

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        count = len(ranks)
        if name == "broadcast":
            return self.link_seconds + num_bytes / self.hardware.link_bytes_per_second
        steps = math.ceil(math.log2(count))  # trees, for what is short
        return self.link_seconds * max(1, steps) + self.roofline.collective_seconds(name, num_bytes, count)

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return self.link_seconds + num_bytes / self.hardware.link_bytes_per_second
