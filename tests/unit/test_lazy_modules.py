"""Lazy modules before a trace: who is called, in which order, and who is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.capture.lazy_modules import materialise
from quintnet_compiler.capture.step_module import StepModule
from quintnet_compiler.core.empty_storage import check_shapes
from quintnet_compiler.core.errors import CompileError


def test_names_of_lazy_parameters() -> None:
    check_shapes(nn.Linear(2, 2))
    with pytest.raises(CompileError, match="lazy modules have no shapes yet: weight, bias"):
        check_shapes(nn.LazyLinear(2))


class Backwards(nn.Module):
    """Calls its parts in another order than it has them, one twice, and nothing of what comes after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.plain = nn.LazyLinear(3), nn.LazyLinear(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(self.first(x)))
        return self.plain(x if self.plain.weight.sum().item() > 0 else -x).sum()


def test_in_the_order_of_calls() -> None:
    plain, module, x = Backwards(), Backwards(), torch.randn(4, 3)
    parameters = dict(module.named_parameters())
    torch.manual_seed(1)
    plain(x)
    torch.manual_seed(1)
    materialise(StepModule(module, None, "loss", None), (x,), training=True)
    assert all(torch.equal(getattr(plain, n).weight, getattr(module, n).weight) for n in ("last", "first"))
    assert type(module.first) is nn.Linear and dict(module.named_parameters()) == parameters


def test_nothing_is_called_if_nothing_is_lazy() -> None:
    class Unused(nn.Linear):
        def forward(self, _: Tensor) -> Tensor:
            raise AssertionError

    materialise(StepModule(Unused(1, 1), None, "loss", None), (torch.ones(1),), training=True)
