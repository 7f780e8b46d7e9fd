"""A pattern on drawn values, beside autograd of the eager operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from ....core.absent_gpu import CPU, on_device
from ....ops.experts.grouped_rows import group_rows, grouped_linear, ungroup_rows
from .calls import INVALID, OperatorCall, Pattern, wrong
from .device_kernels import on_cpu
from .operands import drawn

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of what is largest; 5e-2 for dtypes of 16 bits


def check_numbers(call: OperatorCall, pattern: Pattern) -> bool:
    """Compare the pattern with autograd of the operator itself; False if this process cannot run that."""
    for positive in (False, True):  # some operators are only defined there
        generator = torch.Generator().manual_seed(len(call.operands))
        bound = min([n for x in call.operands for n in x.shape if n] or [1])
        draw: list[Tensor] = []
        for x, first in zip(call.operands, call.same, strict=True):  # one value that is read twice is drawn once
            draw.append(draw[first] if first < len(draw) else drawn(x, generator, bound, positive))
        draw = _PLANNED[call.target](draw) if call.target in _PLANNED else draw
        arrives = [None if t is None else drawn(t, generator, bound, False) for t in call.tangents]
        try:
            expected = _eager(call, draw, arrives)
        except INVALID:
            return False  # no kernel here, or the drawn operands are none of its own
        if all(x is None or bool(x.isfinite().all()) for x in expected):
            break
    places = zip(pattern.inputs, draw, strict=True)
    env = dict(places) | {p: t for p, t in zip(pattern.tangents, arrives, strict=True) if p is not None}
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = [None if n is None else _run(n, env) for n in (*pattern.outputs, *pattern.gradients)]
    except NotImplementedError:
        return False  # what it is traced to runs on another kind of device
    except INVALID as error:
        raise wrong(call, f"it does not run: {error}") from error
    for position, (have, want) in enumerate(zip(found, expected, strict=True)):
        worst = difference(have, want)
        if worst is not None:
            count = len(pattern.outputs)
            what = f"output {position}" if position < count else f"gradient {position - count}"
            raise wrong(call, f"{what} is off by {worst:.1e} of its largest value")
    return True


def _eager(call: OperatorCall, draw: Sequence[Tensor], arrives: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The outputs that the backward may need, then the gradient of each operand."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.detach().requires_grad_(flag) for x, flag in zip(draw, call.grads, strict=True)]
        args, kwargs = on_device(call.filled(leaves), CPU)
        made = _REFERENCES.get(call.target, call.target)(*args, **kwargs)
        outs = list(made) if isinstance(made, (tuple, list)) else [made]
        pairs = [(o, t) for o, t in zip(outs, arrives, strict=True) if t is not None and o.requires_grad]
        ask = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad([o for o, _ in pairs], ask, [t for _, t in pairs], allow_unused=True))
        return [*outs, *(next(grads) if x.requires_grad else None for x in leaves)]


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    if node not in env:
        args, kwargs = on_device(fx.map_arg((node.args, node.kwargs), lambda n: _run(n, env)), CPU)
        env[node] = on_cpu(node.target)(*args, **kwargs)
    return env[node]


def difference(have: Tensor | None, want: Tensor | None) -> float | None:
    """The largest error, of what is largest; None where it is no more than rounding."""
    if have is None or not isinstance(want, Tensor):
        return None if want is None or (have is None and not bool(want.any())) else math.inf
    if have.shape != want.shape:
        return math.inf
    if not want.is_floating_point() and not want.is_complex():
        return None if torch.equal(have.to(want.dtype), want) else math.inf
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = have.detach().to(wide), want.detach().to(wide)
    known = b.isfinite()
    if not torch.equal(known, a.isfinite()):
        return math.inf
    gap, size = (float(x[known].abs().max()) if bool(known.any()) else 0.0 for x in (a - b, b))
    return None if gap <= TOLERANCE.get(want.dtype, 5e-2) * max(size, 1e-3) else gap / max(size, 1e-30)


def _experts(rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Each row times the matrix of its expert, one by one."""
    chosen = (torch.arange(rows.shape[0]).unsqueeze(1) >= ends).sum(1)
    matrix = weight[chosen] if transposed else weight[chosen].transpose(1, 2)
    made = (rows.unsqueeze(1) @ matrix).squeeze(1)
    return made if bias is None else made + bias[chosen]


# operators of this package that autograd knows nothing of
_REFERENCES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        grouped_linear: _experts,
        group_rows: lambda x, order, ends: x[order],
        ungroup_rows: lambda x, order, ends: x[order.argsort()],
    }
)


def _ending(x: Tensor, ends: Tensor) -> Tensor:
    """Drawn ``ends`` of groups as there may be: in order, and the last where the rows of ``x`` end."""
    return torch.cat([ends.sort().values[:-1], ends.new_full([1], x.shape[0])])


# what takes a plan, and one made of drawn operands
_PLANNED: Mapping[Any, Callable[[list[Tensor]], list[Tensor]]] = MappingProxyType(
    {
        grouped_linear: lambda draw: [draw[0], _ending(draw[0], draw[1]), *draw[2:]],
        **dict.fromkeys(
            (group_rows, ungroup_rows), lambda draw: [draw[0], draw[1].argsort(), _ending(draw[0], draw[2])]
        ),
    }
)
