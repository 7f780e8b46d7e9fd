"""Gradients of losses as pointwise expressions: what torch's operators compute, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from quintnet_compiler.compat.torch import make_fx
from quintnet_compiler.compat.torch_inductor import decompositions
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.ops.op_spec import Decomposition
from quintnet_compiler.ops.pointwise_losses import nll_loss_backward

aten = torch.ops.aten
BACKWARD = aten.nll_loss_backward.default
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_nll_loss_is_the_operators(reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    number = REDUCTIONS[reduction]
    for shape, weighted, ignored in itertools.product([(6, 5), (5,), (0, 5)], [False, True], [-100, 3, 300]):
        x = F.log_softmax(torch.randn(shape), -1).to(dtype)
        target = torch.randint(5, shape[:-1])
        if len(target.shape) and len(target):
            target[2] = min(ignored, 4)
        weight = torch.rand(5).to(dtype) if weighted else None
        loss, total = aten.nll_loss_forward.default(x, target, weight, number, ignored)
        arguments = torch.randn_like(loss), x, target, weight, number, ignored, total
        theirs, ours = BACKWARD(*arguments), nll_loss_backward(*arguments)
        assert ours.dtype is dtype and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_compilers_find_no_scatter() -> None:
    def backward(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = torch.log_softmax(logits, -1)
        return BACKWARD(logits.new_ones([]), rows, labels, None, 2, -100, logits.new_ones([]))

    arguments = torch.randn(4, 8), torch.randint(8, (4,))
    assert spec_of(BACKWARD).consists_of == Decomposition(nll_loss_backward)
    for table, scatters in (({}, True), ({BACKWARD: nll_loss_backward}, False)):
        with torch.no_grad():
            traced = make_fx(backward, decomposition_table={**decompositions(), **table}, tracing_mode="fake")(
                *arguments
            )
        assert any("scatter" in str(node.target) for node in traced.graph.nodes) is scatters
