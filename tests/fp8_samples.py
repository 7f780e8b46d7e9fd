"""Calls of the operators of 8-bit numbers, as :mod:`.operator_samples` has them of others."""

from __future__ import annotations

import torch

from quintnet_compiler.features.fp8.ops.scaled_groups import scaled_expert_linear
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul

from .one_operator import Input, Sample, call
from .operator_samples import by_target, const, const_pos, ints

E4M3, E5M2, WIDE = torch.float8_e4m3fn, torch.float8_e5m2, torch.float64
FORWARD, OF_INPUT, OF_WEIGHT = "mk,nk->mn", "mn,nk->mk", "mn,mk->nk"


def eight(*shape: int) -> Input:
    """Numbers of 8 bits, which have no gradient."""
    return Input(shape, lambda g, s: torch.randn(s, generator=g, dtype=torch.float64).to(E4M3), grad=False)


def _experts(
    rows: Input, ids: Input, weight: Input, bias: Input | None, transposed: bool, scale: tuple[int, ...],
    back: tuple[int, ...], blocks: list[int],
) -> Sample:  # fmt: skip
    copies = eight(*weight.shape), const_pos(*scale), eight(*weight.shape), const_pos(*back)
    return call(scaled_expert_linear, rows, ids, weight, bias, transposed, *copies, blocks, E5M2, True, True)


FP8_SAMPLES = by_target(
    [
        *(call(block_max, const(4, 6, 12), block) for block in ([0, 0, 0], [1, 1, 0], [0, 0, 1], [1, 1, 3], [1, 3, 0])),
        call(block_scale, const_pos(4, 6), E4M3, True),
        call(block_scale, const_pos(6, 1), E5M2, False),
        call(scaled_cast, const(4, 6), const_pos(1, 1), E4M3),
        call(scaled_cast, const(4, 6), const_pos(4, 1), E5M2),
        call(scaled_cast, const(4, 12), const_pos(4, 4), E4M3),
        call(scaled_matmul, eight(4, 3, 6), eight(12, 6), const_pos(1, 1, 1), const_pos(1, 1), FORWARD, WIDE),
        call(scaled_matmul, eight(4, 3, 6), eight(12, 6), const_pos(4, 3, 1), const_pos(12, 1), FORWARD, WIDE),
        call(scaled_matmul, eight(4, 12), eight(6, 12), const_pos(4, 4), const_pos(2, 4), FORWARD, WIDE),
        call(scaled_matmul, eight(4, 3, 12), eight(12, 6), const_pos(4, 3, 1), const_pos(1, 6), OF_INPUT, WIDE),
        call(scaled_matmul, eight(2, 4, 6), eight(2, 4, 12), const_pos(1, 1, 6), const_pos(1, 1, 12), OF_WEIGHT, WIDE),
        call(scaled_matmul, eight(2, 6, 4), eight(2, 6, 12), const_pos(2, 2, 4), const_pos(2, 2, 12), OF_WEIGHT, WIDE),
        _experts(const(12, 4), ints(4, 12), const(4, 6, 4), None, False, (4, 6, 1), (4, 1, 4), [0, 0]),
        _experts(const(12, 4), ints(4, 12), const(4, 4, 6), const(4, 6), True, (4, 1, 1), (4, 1, 1), []),
        _experts(const(12, 8), ints(4, 12), const(4, 12, 8), None, False, (4, 12, 2), (4, 3, 8), [4, 4]),
        _experts(const(12, 4), ints(4, 12), const(4, 4, 8), const(4, 8), True, (4, 1, 2), (4, 1, 2), [0, 4]),
    ]
)
