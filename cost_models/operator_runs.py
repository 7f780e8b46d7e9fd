"""Times of a rank's part of an operator, forward and backward, as kernels with their floors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from ..core.annotations import leaf, needs_grad, tensor_inputs, values
from ..ops.cross_entropy import row_nll
from ..schedules.synthesis import StageTimes
from .hardware import Hardware
from .kernels import Kernel, kernel_seconds, memory
from .operators import ATTENTION_BACKWARD_LAUNCHES, accessed_bytes, kernel_of, size_of

# operators whose gradient is that of the result, or an expanded view of it: no kernel computes it
PASSED_ON = frozenset({"add", "sub", "sum"})
# operators whose backward reads its input a second time, in a second kernel
NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm"})
# kernels of an operator, each with all of its traffic: a logarithm of a softmax, and two that pick
PASSES: Mapping[Any, int] = MappingProxyType({row_nll: 3})


def run_seconds(
    node: fx.Node, share: float, reads: Sequence[float], writes: float, device: Hardware, unknown: str
) -> StageTimes:
    """Return the times of a rank's ``share`` of an operator.

    The operator reads ``reads`` bytes of each tensor input and writes ``writes``. The backward is not a graph yet where
    stages are cut. It is priced as what it mostly is: of a product, a product for each factor and a sum for a bias; of
    a convolution, both at once; of attention, 2.5 times its arithmetic; of others, one pass over memory, two for norms.
    Gradients of parameters are added up; those of weights by their product.
    """
    passes = PASSES.get(node.target, 1)
    kernel = _part(kernel_of(node, unknown), share, passes * accessed_bytes(node.target, reads, writes))
    kernel = replace(kernel, launches=kernel.launches * passes)
    if not needs_grad(node):
        return StageTimes(kernel_seconds(kernel, device), 0.0, 0.0)
    if kernel.kind == "view":  # gradients of several parts are put together
        return StageTimes(0.0, traffic_seconds(2 * writes, device) if len(values(node)) > 1 else 0.0, 0.0)
    inputs, parameters = _backward_seconds(node, kernel, reads, writes, device)
    return StageTimes(kernel_seconds(kernel, device), inputs, parameters)


def _backward_seconds(
    node: fx.Node, kernel: Kernel, reads: Sequence[float], writes: float, device: Hardware
) -> tuple[float, float]:
    """Return the times of gradients of inputs, and of parameters."""
    trained = _trained_inputs(node, reads)
    product = kernel.kind == "matmul" and kernel.rows > 0 and size_of(node) is None
    halves = {False: 0.0, True: 0.0}  # by whether gradients are of parameters
    for operand in trained:
        if product and operand.place < 2:
            halves[operand.parameter] += kernel_seconds(_gradient(kernel, operand.place), device)
        else:
            halves[operand.parameter] += traffic_seconds(writes, device) if product else 0.0
            halves[operand.parameter] += traffic_seconds(3 * operand.bytes, device) if operand.parameter else 0.0
    if trained and not product and _name(node) not in PASSED_ON:
        backward = _joint_gradient(kernel, writes, norm=_name(node) in NORMS)
        halves[all(operand.parameter for operand in trained)] += kernel_seconds(backward, device)
    return halves[False], halves[True]


class _TrainedInput(NamedTuple):
    """A tensor input that needs a gradient."""

    place: int
    parameter: bool
    bytes: float


def _trained_inputs(node: fx.Node, reads: Sequence[float]) -> list[_TrainedInput]:
    inputs = enumerate(zip(tensor_inputs(node), reads, strict=True))
    return [
        _TrainedInput(place, leaf(source) is not None, size) for place, (source, size) in inputs if needs_grad(source)
    ]


def _joint_gradient(kernel: Kernel, writes: float, norm: bool) -> Kernel:
    """Return the kernel of all gradients of an operator at once."""
    factor = {"attention": 2.5, "matmul": 2.0}.get(kernel.kind, 1.0)
    return replace(
        kernel,
        flops=factor * kernel.flops,
        bytes=factor * kernel.bytes + writes * (3 if norm else 1),
        batch=2 * kernel.batch if kernel.kind == "matmul" else kernel.batch,
        launches=ATTENTION_BACKWARD_LAUNCHES if kernel.kind == "attention" else kernel.launches + norm,
    )


def traffic_seconds(num_bytes: float, device: Hardware) -> float:
    """Return the time of one kernel that reads and writes so many bytes together."""
    return kernel_seconds(memory("", num_bytes), device)


def _part(kernel: Kernel, share: float, num_bytes: float) -> Kernel:
    """Return a rank's share of a kernel: fewer products of a batch, else fewer rows."""
    if kernel.kind == "view":
        return kernel
    batch = max(1, math.ceil(kernel.batch * share))
    rows = math.ceil(kernel.rows * kernel.batch * share / batch)
    return replace(kernel, flops=kernel.flops * share, bytes=num_bytes, rows=rows, batch=batch)


def _gradient(kernel: Kernel, factor: int) -> Kernel:
    """Return the product that computes the gradient of the first or the second factor."""
    if factor == 0:
        return replace(kernel, columns=kernel.depth, depth=kernel.columns)
    return replace(kernel, rows=kernel.depth, depth=kernel.rows)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__) if getattr(target, "namespace", "") == "aten" else ""
