"""Every operator's generated forward and backward with inputs and gradients that are not contiguous.

A kernel that reads memory as contiguous gives wrong numbers for a transposed, sliced or expanded gradient, or writes
what it never initialised. The parts of every rank lie in each format, and must make up what the unsplit operator makes
of contiguous tensors (one_operator.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from quintnet_compiler.features.text_generation.ops import paged_attention
from quintnet_compiler.ir.builder import aten
from quintnet_compiler.ops.attention.operator import attention
from quintnet_compiler.ops.rules.table import RULES

from .all_samples import SAMPLES
from .one_operator import FORMATS, check

torch.set_num_threads(1)
# Their backward kernels, or their own, read contiguous memory; and the most used ones.
SOME = [
    aten.group_norm.default, aten._weight_norm.default, aten.layer_norm.default, aten.conv2d.default,
    aten.max_pool2d.default, aten.linear.default, aten.gelu.default, aten.matmul.default, attention,
]  # fmt: skip

# Formats that PyTorch's own kernels refuse, unsplit as well: what they say.
REFUSED = {
    (aten.nll_loss2d_forward.default, "transposed"): "grad_input must be contiguous",
    (aten.nll_loss2d_forward.default, "channels_last"): "grad_input must be contiguous",
    (aten.pixel_shuffle.default, "channels_last"): "Unsupported memory format",
    (aten.native_group_norm.default, "transposed"): "Expected X.is_contiguous",
    (aten.native_group_norm.default, "spaced"): "Expected X.is_contiguous",
    (aten.view_as_complex.default, "transposed"): "last dimension with stride 1",
    (aten.view_as_complex.default, "spaced"): "last dimension with stride 1",
}
# Caches of keys and values are a rank's own, and contiguous: nothing is written to a copy.
REFUSED_CACHES = {(paged_attention, name): "view size is not compatible" for name in ("transposed", "channels_last")}


def _unsplit(target: Any, memory: str) -> None:
    """The operator and its derivative by autograd, without this package."""
    arrange = FORMATS[memory]
    if target is aten.nll_loss2d_forward.default:
        x = arrange(torch.randn(4, 5, 2, 4)).requires_grad_()
        torch.nn.functional.nll_loss(x, torch.randint(5, (4, 2, 4))).backward()
    elif target is aten.pixel_shuffle.default:
        torch.pixel_shuffle(arrange(torch.randn(2, 4, 8, 2, 2)), 2)
    elif target is aten.native_group_norm.default:
        aten.native_group_norm(arrange(torch.randn(4, 4, 2)), None, None, 4, 4, 2, 2, 1e-5)
    else:
        torch.view_as_complex(arrange(torch.randn(4, 4, 2)))


@pytest.mark.parametrize(("target", "memory"), REFUSED, ids=str)
def test_pytorch_refuses_a_format_itself(target: Any, memory: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[target, memory]):
        _unsplit(target, memory)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", SOME, ids=str)
def test_some_operators_in_every_memory_format(target: Any) -> None:
    for memory in FORMATS:
        for sample in SAMPLES[target][:2]:
            check(sample, RULES, (2,), memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("target", sorted(SAMPLES, key=str), ids=str)
def test_every_operator_in_every_memory_format(target: Any, memory: str) -> None:
    refused = (REFUSED | REFUSED_CACHES).get((target, memory))
    with pytest.raises(RuntimeError, match=refused) if refused else nullcontext():
        for sample in SAMPLES[target]:
            check(sample, RULES, (2,), memory=memory)
