"""Buffers whose new values need all rows of a step at once, with microbatches: computed when the step is over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.driver import any_length
from quintnet_compiler.ir.at_sizes import at_sizes

torch.set_num_threads(1)


class Changing(nn.Module):
    """A queue of the newest rows, sorted, as contrastive learning keeps one; signs of sums; and random steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(16, 4))
        self.register_buffer("signs", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.queue = torch.cat([h, self.queue])[:16].sort(0).values
            self.signs += torch.randn(4, dtype=x.dtype) * torch.sign(h.sum(0)) + (y.sum(0) > 1)
            self.count += 1
        return h.square().mean()


class Scaled(nn.Module):
    """Counts of the largest feature, and a buffer that moves by their signs times the length of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            load = nn.functional.one_hot(h.argmax(-1), 4).sum((0, 1)).to(x.dtype)
            self.bias += torch.sign(load / x.shape[1] - x.shape[0] / 4) * x.shape[1]
        return (h - y).square().mean()


@pytest.mark.slow
def test_programs_of_further_lengths_have_their_own_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth length is compiled with symbols; numbers stand in their places at the end of a step, too."""
    torch.manual_seed(0)
    model = Scaled().double()
    twin = copy.deepcopy(model)

    def batch(length: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(2, 8, length, 4, dtype=torch.float64))  # type: ignore[return-value]

    made = []
    monkeypatch.setattr(any_length, "at_sizes", lambda *given: made.append(at_sizes(*given)) or made[-1])
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch(6), microbatches=2)
    for length in (6, 8, 10, 12, 14, 16, 9):
        given = batch(length)
        torch.testing.assert_close(program.step(given).detach(), twin(*given).detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(model.bias, twin.bias)
    ends = [one.local.staged.sharded.program.end for one in made]
    times = torch.ops.aten.mul.Scalar
    numbers = [n.args[1] for end in ends if end is not None for n in end.graph.nodes if n.target is times]
    assert {14, 16} <= set(numbers) and all(type(number) is int for number in numbers)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp": 2}, {"microbatches": 2}),
        ({"dp": 3}, {"microbatches": 2, "zero": 3}),
        ({"tp": 2}, {"microbatches": 4}),
        ({"dp": 2}, {"microbatches": 2, "precision": "bf16"}),
    ],
    ids=str,
)
def test_buffers_that_need_all_rows(axes: dict[str, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if "precision" in options else torch.float64
    batch = torch.randn(8, 4, dtype=dtype), torch.randn(8, 4, dtype=dtype)
    report = quintnet.compile(Changing().to(dtype), quintnet.Mesh(**axes), batch, **options).verify()
    assert report.ok, str(report)
    assert {one.name for one in report.comparisons if one.what == "buffer"} == {"queue", "signs", "count"}
