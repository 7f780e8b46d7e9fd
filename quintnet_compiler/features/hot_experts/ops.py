"""Operators of the copies that ranks have of hot experts: they move nothing, and depend on the rank's coordinate."""

from __future__ import annotations

from ...ops.define import define_operator
from ...ops.extensions import extend
from ...ops.op_spec import OpSpec

# the slices of ``hot`` experts, of a value with one for each of the ``own`` experts of a rank; zeros for those of other
# ranks, so that the results add up
pick_experts = define_operator(
    "pick_experts(Tensor x, int[] hot, int own, str[] axes, int[] sizes) -> Tensor",
    lambda x, hot, own, axes, sizes: x.new_empty([len(hot), *x.shape[1:]]),
)
# its transpose: zeros for experts that are not hot
place_experts = define_operator(
    "place_experts(Tensor x, int[] hot, int own, str[] axes, int[] sizes) -> Tensor",
    lambda x, hot, own, axes, sizes: x.new_empty([own, *x.shape[1:]]),
)
extend(pick_experts, OpSpec(work="memory", on_rank=True, transpose=place_experts))
extend(place_experts, OpSpec(work="memory", on_rank=True))
