"""Random functions of torch in a forward: the same numbers on every layout, and those of the module under the same
numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .random_functions import NOISY

LAYOUTS = [(Mesh(dp=2, tp=2), 1), (Mesh(dp=2), 2), (Mesh(pp=2), 2), (Mesh(tp=4), 1)]


class Noisy(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second, self.noisy = nn.Linear(4, 8), nn.Linear(8, 8), NOISY[name]

    def forward(self, x: Tensor) -> Tensor:
        made = self.noisy(self.second(torch.tanh(self.first(x))))
        return made.flatten(1).square().mean()


def _program(name: str, mesh: Mesh, microbatches: int) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    batch = (torch.randn(8, 4, dtype=torch.float64),)
    return quintnet.compile(Noisy(name).double(), mesh, batch, microbatches=microbatches, seed=3)


def _losses(name: str, mesh: Mesh, microbatches: int) -> list[float]:
    """Of two steps. The module itself is compared twice: its loss and gradients before, and all values after."""
    program = _program(name, mesh, microbatches)
    batch = (torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)
    found = [float(program.step(batch)) for _ in range(2)]
    report = program.verify(batch)
    assert report.ok and report.worst.error < 1e-12, str(report)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NOISY)
def test_numbers_are_the_same_on_a_layout(name: str) -> None:
    whole = _losses(name, Mesh(dp=1), 1)
    assert whole[0] != whole[1] or name in (
        "rrelu in evaluation",
        "hard gumbel_softmax",
    )  # the mean of squares of 1 and 0
    assert _losses(name, *LAYOUTS[0]) == pytest.approx(whole, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("name", NOISY)
def test_numbers_are_the_same_on_every_layout(name: str, layout: tuple[Mesh, int]) -> None:
    assert _losses(name, *layout) == pytest.approx(_losses(name, Mesh(dp=1), 1), rel=1e-12)


def test_a_generator_of_ones_own_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            mine = torch.Generator().manual_seed(1)
            return (self.linear(x) + torch.rand(4, generator=mine)).sum()

    with pytest.raises(quintnet.CompileError, match=r"QN1\d\d"):
        quintnet.compile(Own(), Mesh(dp=2), (torch.randn(4, 4),))
