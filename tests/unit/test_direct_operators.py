"""Operators of aten that a model calls itself, each of whose results it uses: also those that are there for a backward,
of which autograd has no derivative, and with a change in place somewhere, which has the module traced once more."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor], Sequence[Tensor]]
DIMS = MappingProxyType({2: (3, 4), 3: (3, 4, 6)})
LABELS = torch.tensor([[0, 1, -1, 2], [2, -1, 3, 0], [-1, 0, 1, 2]])
CASES: Mapping[str, tuple[int, Function]] = MappingProxyType(
    {
        "native_layer_norm": (2, lambda x, w: aten.native_layer_norm(x, (4,), w, None, 0.1)),
        "native_group_norm": (3, lambda x, w: aten.native_group_norm(x, w, None, 3, 4, 6, 2, 0.1)),
        "native_batch_norm": (3, lambda x, w: aten.native_batch_norm(x, w, None, None, None, True, 0.1, 0.1)),
        "_fused_rms_norm": (2, lambda x, w: aten._fused_rms_norm(x, (4,), w, 0.1)),
        "log_sigmoid_forward": (2, lambda x, w: aten.log_sigmoid_forward(x)),
        "multilabel_margin_loss": (2, lambda x, w: aten.multilabel_margin_loss_forward(x, LABELS, 1)),
        "multi_margin_loss": (2, lambda x, w: [aten.multi_margin_loss(x, LABELS[:, 0].abs(), 1, 1.0)]),
        "upsample_nearest1d": (3, lambda x, w: [aten.upsample_nearest1d(x, [9])]),
        "upsample_nearest2d": (3, lambda x, w: [aten.upsample_nearest2d(x[None], [7, 9])]),
        "upsample_bilinear2d": (3, lambda x, w: [aten.upsample_bilinear2d(x[None], [7, 9], False)]),
        "upsample_bicubic2d": (3, lambda x, w: [aten.upsample_bicubic2d(x[None], [7, 9], True)]),
        "hardshrink": (2, lambda x, w: [aten.hardshrink(x, 0.3), aten.softshrink(x, 0.2)]),
        "var_mean": (2, lambda x, w: torch.var_mean(x, 1)),
        "frexp": (2, lambda x, w: torch.frexp(x)[:1]),
        "inv_ex": (2, lambda x, w: torch.linalg.inv_ex(x[:, :3])[:1]),
    }
)


class Direct(nn.Module):
    def __init__(self, name: str, *, changes: bool) -> None:
        super().__init__()
        dims, self.function = CASES[name]
        dice = torch.Generator().manual_seed(0)
        self.x = nn.Parameter(torch.randn(DIMS[dims], generator=dice).double())
        self.weight = nn.Parameter(torch.rand(4, generator=dice).double())
        self.changes = changes

    def forward(self, scale: Tensor) -> Tensor:
        factor = scale.mean()
        if self.changes:
            factor = factor * 2
            factor.mul_(0.5)
        loss = 0 * self.weight.sum()
        for out in self.function(self.x * factor, self.weight):
            loss = loss + (out * torch.linspace(-1, 2, out.numel()).double().view(out.shape)).sum()
        return loss


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", [False, True], ids=["", "with a change in place"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_autograds(name: str, changes: bool) -> None:
    model, scale = Direct(name, changes=changes), torch.ones(4).double()
    unsplit = copy.deepcopy(model)
    expected = unsplit(scale)
    expected.backward()
    program = quintnet.compile(model, Mesh(dp=1), (scale,), check="off")
    torch.testing.assert_close(program.step((scale,)), expected.detach())
    for ours, theirs in zip(program.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
