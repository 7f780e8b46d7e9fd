"""Products of 8-bit numbers of rows in the order of their experts, and layers of experts that multiply these.

Rows are ordered as in :mod:`....ops.experts.grouped_rows`.

On GPUs a product is a grouped one of 16-bit numbers, which have all 8-bit ones: on an H200 (PyTorch 2.11)
``torch._scaled_grouped_mm`` took 0.6 to 0.9 of the time for 8 large experts, 1.9 to 2.6 times as long for 64 and 128,
and the copies that it asks for came on top (``benchmarks/eight_bit_matmuls.py --experts``).

Scales, as :mod:`.scaled_products` has them: of rows [N, F], one for each ([N, 1]) or for B numbers of it ([N, F / B]),
or one for all ([1, 1]); of matrices [E, O, I], one for each expert and row of its matrix ([E, O, 1]) or column
([E, 1, I]), or for B numbers of these ([E, O, I / B], [E, O / B, I]), or for squares ([E, O / B, I / B]), or one for
each expert ([E, 1, 1]). A gradient of weights adds up over the rows of an expert, of which there may be any number:
there each column of an expert's rows has a scale ([E, F]), or all rows have one ([1, 1]).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....compat.torch_codegen import SHIPPED
from ....ops.define import define_operator
from ....ops.experts.expert_linear import counts_on_host
from ....ops.experts.grouped_rows import (
    expert_runs,
    experts_of_rows,
    group_plan,
    group_rows,
    grouped_bias_grad,
    grouped_linear,
    grouped_weight_grad,
    ungroup_rows,
    zeros_of_no_rows,
)
from ....ops.extensions import extend
from ....ops.op_spec import OpSpec
from .scaled_products import block_max, block_scale, scaled_cast, scaled_product, spread

aten = torch.ops.aten
LOW = torch.bfloat16  # has all 8-bit numbers, and grouped products on GPUs


def _group_max(rows: Tensor, ends: Tensor) -> Tensor:
    experts, features = ends.shape[0], rows.shape[1]
    largest = SHIPPED.zeros([experts + 1, features], dtype=torch.float32, device=rows.device)
    if ends.device.type == "cpu":
        for expert, run in expert_runs(ends):
            largest[expert] = rows[run].abs().amax(0)
    else:
        of = experts_of_rows(ends, rows.shape[0])[:, None].expand(rows.shape).long()
        largest.scatter_reduce_(0, of, rows.abs().float(), "amax")  # the last is that of rows of no expert
    return largest[:-1]


def _group_cast(rows: Tensor, ends: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    of = experts_of_rows(ends.to(rows.device), rows.shape[0]).clamp_(max=scale.shape[0] - 1)
    cast: Tensor = scaled_cast(rows, scale.index_select(0, of), dtype)
    return cast


def _linear(
    rows: Tensor, ends: Tensor, weight: Tensor, scale_rows: Tensor, scale: Tensor, bias: Tensor | None,
    transposed: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    right, scale = (weight, scale) if transposed else (weight.transpose(1, 2), scale.transpose(1, 2))
    count = rows.shape[0]
    if ends.device.type == "cpu" or not count:
        out = rows.new_empty([count, right.shape[2]], dtype=dtype)
        for expert, run in expert_runs(ends) if count else ():
            mine = scale_rows if scale_rows.shape[0] == 1 else scale_rows[run].clone()  # where kernels want addresses
            out[run] = scaled_product(rows[run], right[expert], mine, scale[expert], dtype)
            if bias is not None:
                out[run] += bias[expert]
        return out
    of = experts_of_rows(ends, count).clamp_(max=ends.shape[0] - 1)
    after = scale_rows.shape[1] == scale.shape[1] == 1  # sums of numbers of one scale
    if not after:
        rows, right = (x * spread(s, x.shape) for x, s in ((rows.float(), scale_rows), (right.float(), scale)))
    result: Tensor = aten._grouped_mm.default(rows.to(LOW).contiguous(), right.to(LOW), ends)
    if after:
        result = (result * scale_rows * spread(scale[:, 0], [*ends.shape, right.shape[2]]).index_select(0, of)).to(
            dtype
        )
    return result if bias is None else result + bias.index_select(0, of)


def _weight_grad(
    grad: Tensor, rows: Tensor, ends: Tensor, scale_grad: Tensor, scale_rows: Tensor, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    pairs = (grad, scale_grad), (rows, scale_rows)
    (left, scale_left), (right, scale_right) = reversed(pairs) if transposed else pairs
    experts, count = ends.shape[0], rows.shape[0]
    scale_left, scale_right = (s.expand(experts, -1) for s in (scale_left, scale_right))
    if ends.device.type == "cpu" or not count:
        gradient = rows.new_zeros([experts, left.shape[1], right.shape[1]], dtype=dtype)
        for expert, run in expert_runs(ends) if count else ():
            scales = scale_left[expert][:, None], scale_right[expert][None]
            gradient[expert] = scaled_product(left[run].t(), right[run], *scales, dtype)
        return gradient
    sums: Tensor = aten._grouped_mm.default(left.contiguous().to(LOW).t(), right.contiguous().to(LOW), ends)
    return zeros_of_no_rows((sums * scale_left[:, :, None] * scale_right[:, None]).to(dtype), ends)


group_max = define_operator(
    "group_max(Tensor rows, Tensor ends) -> Tensor",
    lambda rows, ends: rows.new_empty([ends.shape[0], rows.shape[1]], dtype=torch.float32),
    _group_max,
)
group_cast = define_operator(
    "group_cast(Tensor rows, Tensor ends, Tensor scale, ScalarType dtype) -> Tensor",
    lambda rows, ends, scale, dtype: rows.new_empty(rows.shape, dtype=dtype),
    _group_cast,
)
# each row times the matrix of its expert, [E, O, I] (``transposed``: [E, I, O])
scaled_grouped_linear = define_operator(
    "scaled_grouped_linear(Tensor rows, Tensor ends, Tensor weight, Tensor scale_rows, Tensor scale, Tensor? bias, "
    "bool transposed, ScalarType dtype) -> Tensor",
    lambda rows, ends, weight, scale_rows, scale, bias, transposed, dtype: rows.new_empty(
        [rows.shape[0], weight.shape[2 if transposed else 1]], dtype=dtype
    ),
    _linear,
)
scaled_grouped_weight_grad = define_operator(
    "scaled_grouped_weight_grad(Tensor grad, Tensor rows, Tensor ends, Tensor scale_grad, Tensor scale_rows, "
    "bool transposed, ScalarType dtype) -> Tensor",
    lambda grad, rows, ends, scale_grad, scale_rows, transposed, dtype: rows.new_empty(
        [ends.shape[0], *((rows.shape[1], grad.shape[1]) if transposed else (grad.shape[1], rows.shape[1]))],
        dtype=dtype,
    ),
    _weight_grad,
)


def _expert_linear(
    rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, weight8: Tensor, scale: Tensor,
    back8: Tensor | None, back_scale: Tensor | None, blocks: Sequence[int], gradient: torch.dtype, power_of_two: bool,
    of_weight: bool,
) -> Tensor:  # fmt: skip
    order, ends = group_plan(ids, weight.shape[0], None, counts_on_host(rows, weight))
    rows = group_rows(rows, order, ends)
    largest = block_max(rows, [1, blocks[0]]) if blocks else block_max(group_max(rows, ends), [0, 0])
    scale_rows = block_scale(largest, weight8.dtype, power_of_two)
    rows8 = scaled_cast(rows, scale_rows, weight8.dtype)
    result = scaled_grouped_linear(rows8, ends, weight8, scale_rows, scale, bias, transposed, rows.dtype)
    ungrouped: Tensor = ungroup_rows(result, order, ends)
    return ungrouped


# ``expert_linear`` of which all three products, forward and backward, are of 8-bit numbers. ``weight8`` and ``scale``
# are the weight with scales for the forward, ``back8`` and ``back_scale`` for the gradient of rows, if they have one;
# rows are cast where they meet the weight, so ranks that hold experts scale what has arrived. ``blocks``: how many
# numbers of a row have one scale, of what the product reads and of what it makes, 0: all of them; in the gradient of
# weights each column of an expert's rows has one. If empty, all rows have one. ``gradient``: the format of gradients of
# results. ``of_weight``: whether the gradient of the weight is such a product, too.
scaled_expert_linear = define_operator(
    "scaled_expert_linear(Tensor rows, Tensor ids, Tensor weight, Tensor? bias, bool transposed, Tensor weight8, "
    "Tensor scale, Tensor? back8, Tensor? back_scale, int[] blocks, ScalarType gradient, bool power_of_two, "
    "bool of_weight) -> Tensor",
    lambda rows, ids, weight, bias, transposed, *_: rows.new_empty(
        [rows.shape[0], weight.shape[2 if transposed else 1]]
    ),
    _expert_linear,
)
extend(group_max, OpSpec("memory", priced_as=grouped_bias_grad))
extend(group_cast, OpSpec("memory"))
extend(scaled_grouped_linear, OpSpec("matmul", keep=True, priced_as=grouped_linear))
extend(scaled_grouped_weight_grad, OpSpec("matmul", priced_as=grouped_weight_grad))
extend(
    scaled_expert_linear,
    OpSpec(
        priced_as=grouped_linear,
        by_expert=True,
        no_copies="multiplies 8-bit numbers",
        exchanges=True,
        unpadded=True,
    ),
)
