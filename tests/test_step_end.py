"""Buffers whose new values need all rows of a step at once, with microbatches: computed when the step is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet

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


@pytest.mark.sample(2)
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
