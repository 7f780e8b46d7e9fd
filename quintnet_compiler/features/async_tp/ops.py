"""Collectives fused with matmuls that need them, or that they need (Wang et al. 2023).

While a slice travels, another is multiplied. A weight is [in, out], or ``transposed``: [out, in]; ``dim`` is never the
last one. They are priced by their matmuls and what these do not hide.
"""

from __future__ import annotations

from torch import Tensor

from ...ops.collectives import CollectiveSpec
from ...ops.define import define_operator, resized
from ...ops.extensions import extend
from ...ops.op_spec import OpSpec


def _all_gather_matmul_shapes(
    x: Tensor, axis: str, size: int, dim: int, parts: int, weights: list[Tensor], biases: object,
    transposed: list[bool], keep: bool,
) -> list[Tensor]:  # fmt: skip
    whole = resized(x, dim, times=size)
    columns = [w.shape[0] if turn else w.shape[1] for w, turn in zip(weights, transposed, strict=True)]
    return [*(whole.new_empty([*whole.shape[:-1], n]) for n in columns), *([whole] if keep else [])]


def _matmul_reduce_scatter_shape(
    xs: list[Tensor], axis: str, size: int, dim: int, parts: int, weights: list[Tensor], biases: object,
    transposed: list[bool],
) -> Tensor:  # fmt: skip
    columns = weights[0].shape[0] if transposed[0] else weights[0].shape[1]
    return resized(xs[0].new_empty([*xs[0].shape[:-1], columns]), dim, over=size)


# each weight's product with all_gather(x), and (``keep``) what was gathered
all_gather_matmul = define_operator(
    "all_gather_matmul(Tensor x, str axis, int size, int dim, int parts, Tensor[] weights, Tensor?[] biases, "
    "bool[] transposed, bool keep) -> Tensor[]",
    _all_gather_matmul_shapes,
)
# reduce_scatter of the sum of each of ``xs`` times its weight
matmul_reduce_scatter = define_operator(
    "matmul_reduce_scatter(Tensor[] xs, str axis, int size, int dim, int parts, Tensor[] weights, Tensor?[] biases, "
    "bool[] transposed) -> Tensor",
    _matmul_reduce_scatter_shape,
)
for _collective in (
    CollectiveSpec(all_gather_matmul, "matmul", slice_at="input", opaque=True),
    CollectiveSpec(matmul_reduce_scatter, "matmul", slice_at="result", opaque=True),
):
    extend(_collective.op, OpSpec(work="matmul", collective=_collective, on_rank=True, takes_size=True))
