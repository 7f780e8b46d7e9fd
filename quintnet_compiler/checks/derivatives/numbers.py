"""Comparison of a pattern with autograd of the eager operator, on drawn values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CPU, on_device
from ...ops.experts.grouped_rows import group_rows, grouped_linear, ungroup_rows
from .calls import INVALID, OperatorCall, Pattern, wrong
from .device_kernels import on_cpu
from .operands import drawn

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # as a share of the largest value; 5e-2 for 16 bits


def check_numbers(call: OperatorCall, pattern: Pattern) -> bool:
    """Compare the pattern with autograd of the operator; return False if this process cannot run that.

    Raises:
        CompileError: QN209 with the output or gradient that is wrong.
    """
    example = _example(call)
    if example is None:
        return False
    operands, tangents, expected = example
    env: dict[fx.Node, Any] = dict(zip(pattern.inputs, operands, strict=True))
    env |= {node: t for node, t in zip(pattern.tangents, tangents, strict=True) if node is not None}
    nodes = (*pattern.outputs, *pattern.gradients)
    try:
        with torch.inference_mode(False), torch.no_grad():
            actual = [None if node is None else _run(node, env) for node in nodes]
    except NotImplementedError:
        return False  # its trace runs on another kind of device
    except INVALID as error:
        raise wrong(call, f"it does not run: {error}") from error
    for position, pair in enumerate(zip(actual, expected, strict=True)):
        error_share = largest_error_share(*pair)
        if error_share is not None:
            count = len(pattern.outputs)
            name = f"output {position}" if position < count else f"gradient {position - count}"
            raise wrong(call, f"{name} is off by {error_share:.1e} of its largest value")
    return True


def _example(
    call: OperatorCall,
) -> tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor | None]] | None:
    """Return drawn operands and tangents, and what autograd makes of them; None if the operator does not run.

    Where results are not finite, the operands are drawn again, between 0 and 1.
    """
    for positive in (False, True):
        generator = torch.Generator().manual_seed(len(call.operands))
        bound = min([n for x in call.operands for n in x.shape if n] or [1])
        operands: list[Tensor] = []
        for x, first in zip(call.operands, call.first_use, strict=True):  # a value that is read twice is drawn once
            operands.append(operands[first] if first < len(operands) else drawn(x, generator, bound, positive))
        plan = _PLANNED.get(call.target)
        operands = operands if plan is None else plan(operands)
        tangents = [None if t is None else drawn(t, generator, bound, False) for t in call.tangents]
        try:
            expected = _eager(call, operands, tangents)
        except INVALID:
            return None  # no kernel, or the operator does not take the drawn operands
        if all(x is None or bool(x.isfinite().all()) for x in expected):
            break
    return operands, tangents, expected


def _eager(call: OperatorCall, operands: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the outputs of the operator, then the gradient of each operand."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(operands, call.grads, strict=True)]
        args, kwargs = on_device(call.with_operands(leaves), CPU)
        result = _REFERENCES.get(call.target, call.target)(*args, **kwargs)
        outs = list(result) if isinstance(result, (tuple, list)) else [result]
        pairs = [(o, t) for o, t in zip(outs, tangents, strict=True) if t is not None and o.requires_grad]
        inputs = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad([o for o, _ in pairs], inputs, [t for _, t in pairs], allow_unused=True))
        return [*outs, *(next(grads) if x.requires_grad else None for x in leaves)]


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node not in env:
        args, kwargs = on_device(fx.map_arg((node.args, node.kwargs), lambda n: _run(n, env)), CPU)
        env[node] = on_cpu(node.target)(*args, **kwargs)
    return env[node]


def largest_error_share(actual: Tensor | None, expected: Tensor | None) -> float | None:
    """Return the largest error as a share of the largest value, or None if it is no more than rounding."""
    if expected is None:
        return None
    if actual is None or not isinstance(expected, Tensor):
        return None if actual is None and not bool(expected.any()) else math.inf
    if actual.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point() and not expected.is_complex():
        return None if torch.equal(actual.to(expected.dtype), expected) else math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return _relative_error(actual.detach().to(wide), expected.detach().to(wide), TOLERANCE.get(expected.dtype, 5e-2))


def _relative_error(actual: Tensor, expected: Tensor, tolerance: float) -> float | None:
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return math.inf
    if not bool(finite.any()):
        return None
    error = float((actual - expected)[finite].abs().max())
    largest = float(expected[finite].abs().max())
    return None if error <= tolerance * max(largest, 1e-3) else error / max(largest, 1e-30)


def _experts(rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Multiply each row by the matrix of its expert, row by row."""
    chosen = (torch.arange(rows.shape[0]).unsqueeze(1) >= ends).sum(1)
    matrix = weight[chosen] if transposed else weight[chosen].transpose(1, 2)
    product = (rows.unsqueeze(1) @ matrix).squeeze(1)
    return product if bias is None else product + bias[chosen]


# operators of this package that have no autograd
_REFERENCES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        grouped_linear: _experts,
        group_rows: lambda x, order, ends: x[order],
        ungroup_rows: lambda x, order, ends: x[order.argsort()],
    }
)


def _valid_ends(x: Tensor, ends: Tensor) -> Tensor:
    """Return drawn ``ends`` of groups in order, with the last at the end of the rows of ``x``."""
    return torch.cat([ends.sort().values[:-1], ends.new_full([1], x.shape[0])])


# operators that take a plan of groups, and how drawn operands become a valid one
_PLANNED: Mapping[Any, Callable[[list[Tensor]], list[Tensor]]] = MappingProxyType(
    {
        grouped_linear: lambda draw: [draw[0], _valid_ends(draw[0], draw[1]), *draw[2:]],
        **dict.fromkeys(
            (group_rows, ungroup_rows), lambda draw: [draw[0], draw[1].argsort(), _valid_ends(draw[0], draw[2])]
        ),
    }
)
