"""A node of an fx graph -> the :class:`Kernel` that it launches. An operator that nobody described raises."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from ..compat.torch import schema
from ..core.annotations import facts, num_bytes, shape, tensor_inputs, values
from ..core.errors import CompileError
from ..ops.catalog import facts_of
from ..ops.collectives import (
    all_gather_matmul,
    matmul_reduce_scatter,
    ring_attention,
    ring_attention_backward,
)
from ..ops.expert_linear import expert_linear, expert_weight_grad
from .kernels import Kernel

aten = torch.ops.aten

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp32"}
)


def _gemm(node: fx.Node, depth: int) -> tuple[int, int, int, int]:
    """(batch, rows, columns, depth) of a matmul whose result is the node's value."""
    out = shape(node)
    columns = out[-1] if out else 1
    return 1, max(1, math.prod(out) // max(1, columns)), max(1, columns), depth


def _linear(node: fx.Node) -> tuple[int, int, int, int]:
    return _gemm(node, shape(tensor_inputs(node)[0])[-1])


def _matmul(node: fx.Node) -> tuple[int, int, int, int]:
    left, right = (shape(source) for source in tensor_inputs(node)[-2:])
    if len(left) < 2 or len(right) < 2:
        return _gemm(node, left[-1])
    batch = math.prod(shape(node)[:-2])
    return batch, left[-2], right[-1], left[-1]


def _added(node: fx.Node) -> tuple[int, int, int, int]:
    return _gemm(node, shape(tensor_inputs(node)[1])[-1])


def _summed(node: fx.Node) -> tuple[int, int, int, int]:
    """Everything that is in the operands and not in the result is summed (einsum, bilinear, distances)."""
    everything = math.prod(shape(source)[-1] for source in tensor_inputs(node)[:1])
    return _gemm(node, everything)


def _convolution(node: fx.Node) -> tuple[int, int, int, int]:
    out, weight = shape(node), shape(tensor_inputs(node)[1])
    return 1, math.prod(out) // weight[0] if weight[0] else 1, weight[0], math.prod(weight[1:])


def _convolution_backward(node: fx.Node) -> tuple[int, int, int, int]:
    """Two products of the forward's size: for the input, and for the weight."""
    grad, weight = shape(tensor_inputs(node)[0]), shape(tensor_inputs(node)[2])
    return 2, math.prod(grad) // max(1, weight[0]), weight[0], math.prod(weight[1:])


def _expert_weight_grad(node: fx.Node) -> tuple[int, int, int, int]:
    grad, rows = (shape(source) for source in tensor_inputs(node)[:2])
    return 1, grad[-1], rows[-1], math.prod(rows[:-1])


def _all_gather_matmul(node: fx.Node) -> tuple[int, int, int, int]:
    """One product for each slice that travels, with all weights side by side."""
    args: Any = node.args
    x, size, made = shape(args[0]), args[2], values(node)[: len(args[5])]
    return size, math.prod(x[:-1]), sum(value.shape[-1] for value in made), x[-1]


def _matmul_reduce_scatter(node: fx.Node) -> tuple[int, int, int, int]:
    """One product for each slice that travels, with all terms end to end."""
    args: Any = node.args
    out = shape(node)
    return args[2], math.prod(out[:-1]), out[-1], sum(shape(x)[-1] for x in args[0])


# Multiply-adds count 2. Each entry says (batch, rows, columns, depth).
PRODUCTS: Mapping[Any, Callable[[fx.Node], tuple[int, int, int, int]]] = MappingProxyType(
    {
        aten.linear.default: _linear,
        expert_linear: _linear,
        all_gather_matmul: _all_gather_matmul,
        matmul_reduce_scatter: _matmul_reduce_scatter,
        expert_weight_grad: _expert_weight_grad,
        aten.convolution_backward.default: _convolution_backward,
        **dict.fromkeys([aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default], _matmul),
        **dict.fromkeys([aten.addmm.default, aten.addmv.default], _added),
        **dict.fromkeys([aten.baddbmm.default, aten.addbmm.default], _matmul),
        **dict.fromkeys(
            [aten.einsum.default, aten.bilinear.default, aten.dot.default, aten.cdist.default,
             aten._cdist_forward.default], _summed,
        ),
        **dict.fromkeys(
            [aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
             aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten.conv_transpose1d.default,
             aten.conv_transpose2d.input, aten.conv_transpose3d.input], _convolution,
        ),
    }
)  # fmt: skip
FLASH_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
    }
)
TAGS = frozenset({torch.Tag.pointwise, torch.Tag.reduction})


def traffic(node: fx.Node) -> float:
    """Bytes that a node reads and writes."""
    moved = float(sum(num_bytes(v) for v in values(node) if isinstance(v, torch.Tensor)))
    for source in tensor_inputs(node):
        found = facts(source).value
        moved += num_bytes(found) if isinstance(found, torch.Tensor) else 0
    return moved


def _dtype(node: fx.Node) -> str:
    made = next(v for v in values(node) if isinstance(v, torch.Tensor))
    return DTYPES.get(made.dtype, "fp32")


def attention_flops(node: fx.Node) -> float:
    """Scores and their use, forward or backward; fused kernels skip the half that a causal mask hides.

    The backward has five products where the forward has two (Dao et al. 2022).
    """
    backward = node.target in FLASH_BACKWARD or node.target is ring_attention_backward
    query, key, value = tensor_inputs(node)[backward : backward + 3]
    keys = shape(key)[-2]
    if node.target in (ring_attention, ring_attention_backward):
        # (q, axis, size, k, v, ...) and (grad, axis, size, q, k, v, ...)
        keys *= int(node.args[2])  # type: ignore[arg-type]
    count = 2.0 * math.prod(shape(query)[:-1]) * keys * (shape(query)[-1] + shape(value)[-1])
    return count * (2.5 if backward else 1.0) * (0.5 if _causal(node) else 1.0)


def _causal(node: fx.Node) -> bool:
    """The argument of that name, wherever the operator has it."""
    for position, argument in enumerate(schema(node.target).arguments):
        if argument.name in ("causal", "is_causal"):
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get(argument.name, given))
    return False


def kernel_of(node: fx.Node, unknown: str = "error") -> Kernel:
    """The kernel of a call_function node, forward, unsplit.

    ``unknown="memory"``: an operator without an entry costs at least what it reads and writes.

    Raises:
        CompileError: QN210 for an operator that has no entry here: it never costs 0 by default.
    """
    target = node.target
    work = facts_of(target).work
    if work == "view":
        return Kernel(node.name, "view", launches=0)
    moved = traffic(node)
    if target in PRODUCTS:
        batch, rows, columns, depth = PRODUCTS[target](node)
        flops = 2.0 * batch * rows * columns * depth
        launches = batch if target in (all_gather_matmul, matmul_reduce_scatter) else 1
        return Kernel(node.name, "matmul", flops, moved, _dtype(node), rows, columns, depth, batch, launches)
    if work == "attention":
        return Kernel(node.name, "attention", attention_flops(node), moved, _dtype(node))
    if unknown == "memory" or work == "memory" or TAGS.intersection(getattr(target, "tags", ())):
        return Kernel(node.name, "memory", bytes=moved)
    raise CompileError(
        "QN210",
        f"the operator {target} has no price",
        where=facts(node).where,
        fix="describe it: a line in ops/catalog.py, and for a matmul its size in cost_models/operators.py",
    )


def model_flops(graph: fx.Graph) -> float:
    """FLOPs of products and attention in one step of the unsplit model whose forward ``graph`` is: twice as many go
    backward (as Narayanan et al. 2021 count; what is computed again does not count)."""
    return 3 * sum(kernel_of(node, "memory").flops for node in graph.nodes if node.op == "call_function")
