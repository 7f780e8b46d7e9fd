"""Which parts of a model are refused by name, and which lines operators of a loss have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.changes import loss_lines
from quintnet_compiler.capture.derivatives import unfollowed_parts
from quintnet_compiler.capture.places import WHERE
from quintnet_compiler.core.errors import CompileError


def _twice(x: Tensor) -> Tensor:
    return x * 2


def test_parts_that_are_followed() -> None:
    unfollowed_parts.check_parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    unfollowed_parts.check_variables([("x", 1), ("twice", _twice)])


def test_parts_by_torch_jit() -> None:
    script = torch.jit.script(nn.ReLU())
    with pytest.raises(CompileError, match=r"the part '1' was made by torch.jit"):
        unfollowed_parts.check_parts(nn.Sequential(nn.Linear(2, 2), script))
    with pytest.raises(CompileError, match=r"the function 'twice' was made by torch.jit"):
        unfollowed_parts.check_variables([("twice", torch.jit.script(_twice))])


def test_operators_of_a_loss_have_its_line() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        scaled = z * 3
        return F.cross_entropy(scaled, y)

    batch = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    graph = capture(nn.Linear(3, 3), batch, loss).graph
    lines = {str(node.target): str(node.meta[WHERE]) for node in graph.nodes if node.op == "call_function"}
    assert "scaled = z * 3" in lines["aten.mul.Tensor"]
    assert "return F.cross_entropy(scaled, y)" in lines["aten.cross_entropy_loss.default"]


def test_outside_of_a_trace_nothing_is_noted() -> None:
    with loss_lines.LossLines():
        assert torch.equal(torch.ones(2) * 3, torch.full((2,), 3.0))
