"""Where a derivative that is the user's own reads and writes buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.changes import backward_writes
from quintnet_compiler.core.errors import CompileError


class _Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.buffer.add_(1)
        return g, None


class _Net(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(3, 3), reads
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = _Adds.apply(self.linear(x), self.count)  # type: ignore[no-untyped-call]
        return (h * self.count if self.reads else h).mean()  # type: ignore[no-any-return]


def test_a_count_is_changed_once() -> None:
    assert capture(_Net(reads=False), (torch.randn(4, 3),)).changed == ("count",)


def test_a_count_that_forward_reads_later_is_refused() -> None:
    with pytest.raises(CompileError, match="changes 'count', which the forward pass changes or reads later"):
        capture(_Net(reads=True), (torch.randn(4, 3),))


def test_a_graph_without_derivatives_is_left_alone() -> None:
    exported = torch.export.export(nn.Linear(3, 3), (torch.randn(4, 3),))
    assert not any(backward_writes.BACKWARD in node.meta for node in exported.graph.nodes)
    backward_writes.check_backwards(exported, set())
