"""Every operator's generated forward and backward with inputs and gradients that are not contiguous.

A kernel that reads memory as contiguous gives wrong numbers for a transposed, sliced or expanded gradient, or writes
what it never initialised. The parts of every rank lie in each format, and must make up what the unsplit operator makes
of contiguous tensors (one_operator.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ops.rules.table import RULES

from .one_operator import FORMATS, check
from .operator_samples import SAMPLES

torch.set_num_threads(1)
# Their backward kernels, or their own, read contiguous memory; and the most used ones.
SOME = [
    aten.group_norm.default, aten._weight_norm.default, aten.layer_norm.default, aten.conv2d.default,
    aten.max_pool2d.default, aten.linear.default, aten.gelu.default, aten.matmul.default,
]  # fmt: skip


@pytest.mark.parametrize("target", SOME, ids=str)
def test_some_operators_in_every_memory_format(target: Any) -> None:
    for memory in FORMATS:
        for sample in SAMPLES[target][:2]:
            check(sample, RULES, (2,), memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("target", sorted(SAMPLES, key=str), ids=str)
def test_every_operator_in_every_memory_format(target: Any, memory: str) -> None:
    for sample in SAMPLES[target]:
        check(sample, RULES, (2,), memory=memory)
