"""What a rank's part of an operator takes to run, forward and backward, as kernels with their floors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import fx

from ..core.annotations import leaf, needs_grad, tensor_inputs, values
from ..ops.cross_entropy import row_nll
from ..schedules.synthesis import StageTimes
from .hardware import Hardware
from .kernels import Kernel, kernel_seconds, memory
from .operators import ATTENTION_BACKWARD_LAUNCHES, SIZES, kernel_of, moved

# whose gradient is that of the result itself, or an expanded view of it: no kernel makes it
PASSED_ON = frozenset({"add", "sub", "sum"})
# whose backward reads its input a second time, in a second kernel
NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm"})
# as how many kernels they run, each with the traffic of the operator: a logarithm of a softmax, and two that pick
PASSES: Mapping[Any, int] = MappingProxyType({row_nll: 3})


def run_seconds(
    node: fx.Node, share: float, reads: Sequence[float], writes: float, device: Hardware, unknown: str
) -> StageTimes:
    """One run of a rank's ``share`` of an operator, which reads ``reads`` bytes of each tensor input and writes
    ``writes``.

    The backward is not a graph yet where stages are cut. It is priced as what it mostly is: of a product, a product for
    each factor and a sum for a bias; of a convolution, both at once; of attention, 2.5 times its arithmetic; of others,
    one pass over memory, two for norms. Gradients of parameters are added up; those of weights by their product.
    """
    passes = PASSES.get(node.target, 1)
    kernel = _part(kernel_of(node, unknown), share, passes * moved(node.target, reads, writes))
    kernel = replace(kernel, launches=kernel.launches * passes)
    if not needs_grad(node):
        return StageTimes(kernel_seconds(kernel, device), 0.0, 0.0)
    if kernel.kind == "view":  # gradients of several parts are put together
        return StageTimes(0.0, traffic_seconds(2 * writes, device) if len(values(node)) > 1 else 0.0, 0.0)
    trained = [(place, leaf(source) is not None, size)
               for place, (source, size) in enumerate(zip(tensor_inputs(node), reads, strict=True))
               if needs_grad(source)]  # fmt: skip
    product = kernel.kind == "matmul" and kernel.rows > 0 and node.target not in SIZES
    halves = {False: 0.0, True: 0.0}  # for what came in, and for parameters
    for place, parameter, size in trained:
        if product and place < 2:
            halves[parameter] += kernel_seconds(_gradient(kernel, place), device)
        else:
            halves[parameter] += traffic_seconds(writes, device) if product else 0.0
            halves[parameter] += traffic_seconds(3 * size, device) if parameter else 0.0
    if trained and not product and _name(node) not in PASSED_ON:
        more = {"attention": 2.5, "matmul": 2.0}.get(kernel.kind, 1.0)
        both = 2 * kernel.batch if kernel.kind == "matmul" else kernel.batch
        norm = _name(node) in NORMS
        launches = ATTENTION_BACKWARD_LAUNCHES if kernel.kind == "attention" else kernel.launches + norm
        size = more * kernel.bytes + writes * (3 if norm else 1)
        whole = replace(kernel, flops=more * kernel.flops, bytes=size, batch=both, launches=launches)
        halves[all(parameter for _, parameter, _ in trained)] += kernel_seconds(whole, device)
    return StageTimes(kernel_seconds(kernel, device), halves[False], halves[True])


def traffic_seconds(num_bytes: float, device: Hardware) -> float:
    """One kernel that reads and writes so many bytes together."""
    return kernel_seconds(memory("", num_bytes), device)


def _part(kernel: Kernel, share: float, moved: float) -> Kernel:
    """Of products in a batch fewer, else with fewer rows."""
    if kernel.kind == "view":
        return kernel
    batch = max(1, math.ceil(kernel.batch * share))
    rows = math.ceil(kernel.rows * kernel.batch * share / batch)
    return replace(kernel, flops=kernel.flops * share, bytes=moved, rows=rows, batch=batch)


def _gradient(kernel: Kernel, factor: int) -> Kernel:
    """The product that makes the gradient of the first or the second factor."""
    if factor == 0:
        return replace(kernel, columns=kernel.depth, depth=kernel.columns)
    return replace(kernel, rows=kernel.depth, depth=kernel.rows)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.overloadpacket.__name__) if getattr(target, "namespace", "") == "aten" else ""
