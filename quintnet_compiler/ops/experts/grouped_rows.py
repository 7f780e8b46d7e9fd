"""Rows in the order of their experts, and products of such rows.

A plan is made once for the ids of a mixture and read by all of its products, forward and backward. It has two parts:
``order`` [N] (int64), the rows by expert, in the model's order within each, those of no expert last; and ``ends`` [E]
(int32), where each expert's rows end. ``ends`` lie on the device if grouped matmuls read them there, so that the host
never waits for them; for loops over experts they lie on the host, which waits for them once.

Rows of no expert have no defined values in this order, as grouped matmuls do not write them. Nothing may add rows up
here but the gradients below, which skip them; ``ungroup_rows`` makes them zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.precision import widened
from ..define import define_operator

aten = torch.ops.aten
NOT_ZERO_FROM = (10, 0)  # compute capability


def has_grouped_matmul(device: torch.device, dtype: torch.dtype, features: Sequence[int]) -> bool:
    """Return whether ``_grouped_mm`` is one kernel on ``device`` for matrices of these sizes; else it is a loop."""
    return device.type != "cpu" and dtype is torch.bfloat16 and not any(n * dtype.itemsize % 16 for n in features)


def sort_into(bins: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of ``bins`` (numbers from 0 on) in stable order, and where each of the first ``count`` ends.

    Both lie on the device of ``bins``, the ends as int32. Nothing makes the host wait.
    """
    ordered, places = _sorted(bins, count)
    numbers = SHIPPED.arange(count, dtype=ordered.dtype, device=bins.device)
    return places, SHIPPED.searchsorted(ordered, numbers, right=True, out_int32=True)


def _sorted(bins: Tensor, count: int) -> tuple[Tensor, Tensor]:
    narrow = bins.to(torch.int16 if count < 2**15 else torch.int32)  # fewer passes of a radix sort
    ordered, places = narrow.sort(stable=True)
    return ordered, places


def plan_groups(ids: Tensor, experts: int, counts: Tensor | None, on_host: bool) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``ends`` of rows with the experts ``ids``; ids not in 0 to ``experts`` - 1 are of no expert.

    ``counts``: those of ``dispatch_plan`` of the same rows, by which the host has the rows of each expert already.
    """
    bins = SHIPPED.where((ids >= 0) & (ids < experts), ids, experts)
    if counts is not None:  # which are on the host
        return _sorted(bins, experts)[1], counts[1, :, :experts].sum(0).cumsum(0).to(torch.int32)
    order, ends = sort_into(bins, experts)
    return order, ends.cpu() if on_host else ends


def _group(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    return x.index_select(0, order)


def _ungroup(x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    if ends.device.type == "cpu":
        assigned = int(ends[-1])  # rows that have an expert
        if assigned == x.shape[0]:
            return SHIPPED.empty_like(x).index_copy_(0, order, x)
        return SHIPPED.zeros_like(x).index_copy_(0, order[:assigned], x[:assigned])
    rows = x.shape[0]
    behind = SHIPPED.arange(rows, dtype=torch.int32, device=x.device) >= ends[-1]
    out = x.new_zeros([rows + 1, *x.shape[1:]])  # the last takes all rows of no expert
    return out.index_copy_(0, order.masked_fill(behind, rows), x)[:rows]


def expert_runs(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and the slice of them in order. The host waits for ``ends``."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each row in order; rows of none have the number of experts."""
    return SHIPPED.searchsorted(ends, SHIPPED.arange(rows, dtype=torch.int32, device=ends.device), right=True)


def _linear(rows: Tensor, ends: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    right = weight if transposed else weight.transpose(1, 2)
    if ends.device.type == "cpu" or not rows.shape[0]:
        out = rows.new_empty([rows.shape[0], right.shape[2]])
        for expert, run in expert_runs(ends) if rows.shape[0] else ():
            SHIPPED.mm(rows[run], right[expert], out=out[run])
            if bias is not None:
                out[run] += bias[expert]
        return out
    products: Tensor = aten._grouped_mm.default(rows.contiguous(), right, ends)
    if bias is not None:
        products += bias.index_select(0, experts_of_rows(ends, rows.shape[0]).clamp_(max=bias.shape[0] - 1))
    return products


def may_leave_empty_products(device: torch.device) -> bool:
    """Return whether the grouped product of an expert without rows may be other than 0 there: it was on a B200
    (pytorch#172439), and not on an H100. Devices that are not NVIDIA's were not tried."""
    if device.type != "cuda" or torch.version.cuda is None:
        return True
    return torch.cuda.get_device_capability(device) >= NOT_ZERO_FROM


def zeros_of_no_rows(products: Tensor, ends: Tensor) -> Tensor:
    """Make the products of experts without rows zeros, in ``products`` [E, O, I], which a kernel wrote. Where it wrote
    zeros there itself, nothing is read or written."""
    if not may_leave_empty_products(products.device):
        return products
    empty = ends == SHIPPED.cat([ends.new_zeros(1), ends[:-1]])
    return products.masked_fill_(empty[:, None, None], 0.0)


def _weight_grad(grad: Tensor, rows: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    if ends.device.type == "cpu" or not rows.shape[0]:
        gradients = rows.new_zeros([ends.shape[0], left.shape[1], right.shape[1]])
        for expert, run in expert_runs(ends) if rows.shape[0] else ():
            SHIPPED.mm(left[run].t(), right[run], out=gradients[expert])
        return gradients
    return zeros_of_no_rows(aten._grouped_mm.default(left.contiguous().t(), right.contiguous(), ends), ends)


def _bias_grad(grad: Tensor, ends: Tensor) -> Tensor:
    experts = ends.shape[0]
    if ends.device.type == "cpu":
        gradients = grad.new_zeros([experts, grad.shape[1]])
        for expert, run in expert_runs(ends):
            SHIPPED.sum(grad[run], 0, out=gradients[expert])
        return gradients
    wide = grad.to(widened(grad.dtype))
    sums = wide.new_zeros([experts + 1, grad.shape[1]])  # the last is that of rows of no expert
    return sums.index_add_(0, experts_of_rows(ends, grad.shape[0]), wide)[:-1].to(grad.dtype)


def _plan_shapes(ids: Tensor, experts: int, counts: Tensor | None, on_host: bool) -> tuple[Tensor, Tensor]:
    where = torch.device("cpu") if on_host else ids.device
    return ids.new_empty(ids.shape, dtype=torch.int64), torch.empty([experts], dtype=torch.int32, device=where)


group_plan = define_operator(
    "group_plan(Tensor ids, int experts, Tensor? counts, bool on_host) -> (Tensor order, Tensor ends)",
    _plan_shapes,
    plan_groups,
)
# rows in the order of a plan, and back; each is the other's transpose
group_rows = define_operator(
    "group_rows(Tensor x, Tensor order, Tensor ends) -> Tensor", lambda x, order, ends: x.new_empty(x.shape), _group
)
ungroup_rows = define_operator(
    "ungroup_rows(Tensor x, Tensor order, Tensor ends) -> Tensor", lambda x, order, ends: x.new_empty(x.shape), _ungroup
)
# Of rows in order: each times the matrix of its expert, [E, O, I] (``transposed``: [E, I, O])
grouped_linear = define_operator(
    "grouped_linear(Tensor rows, Tensor ends, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    lambda rows, ends, weight, bias, transposed: rows.new_empty([rows.shape[0], weight.shape[2 if transposed else 1]]),
    _linear,
)
grouped_weight_grad = define_operator(
    "grouped_weight_grad(Tensor grad, Tensor rows, Tensor ends, bool transposed) -> Tensor",
    lambda grad, rows, ends, transposed: rows.new_empty(
        [ends.shape[0], *((rows.shape[1], grad.shape[1]) if transposed else (grad.shape[1], rows.shape[1]))]
    ),
    _weight_grad,
)
grouped_bias_grad = define_operator(
    "grouped_bias_grad(Tensor grad, Tensor ends) -> Tensor",
    lambda grad, ends: grad.new_empty([ends.shape[0], grad.shape[1]]),
    _bias_grad,
)
