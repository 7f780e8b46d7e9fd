"""Which parts of a model are refused by name, and which lines operators of a loss have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quintnet_compiler.capture.capture import capture
from quintnet_compiler.capture.changes import user_lines
from quintnet_compiler.capture.derivatives import script_functions, unfollowed_parts
from quintnet_compiler.capture.places import WHERE
from quintnet_compiler.compat.torch_script import source_of
from quintnet_compiler.core.errors import CompileError


def _twice(x: Tensor) -> Tensor:
    return x * 2


class _Functions(TorchFunctionMode):
    def __enter__(self) -> _Functions:
        self.names: list[str] = []
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.__name__] if func.__name__ == "mul" else []
        return func(*args, **(kwargs or {}))


def test_parts_that_are_followed() -> None:
    unfollowed_parts.check_parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_parts_by_torch_jit() -> None:
    script = torch.jit.script(nn.ReLU())
    with pytest.raises(CompileError, match=r"the part '1' was made by torch.jit"):
        unfollowed_parts.check_parts(nn.Sequential(nn.Linear(2, 2), script))


def test_calls_of_functions_by_torch_jit() -> None:
    function, x = torch.jit.script(_twice), torch.ones(2)
    traced = torch.jit.trace(lambda x: x * 2, x)
    with script_functions.script_functions_followed(), _Functions() as seen:
        assert torch.equal(function(x), x + x)
        with pytest.raises(CompileError, match=r"was made by torch.jit.trace"):
            traced(x)
    assert seen.names == ["mul"]
    assert source_of(function) is _twice
    assert source_of(traced) is None
    assert torch.equal(traced(x), function(x))


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
    with user_lines.UserLines():
        assert torch.equal(torch.ones(2) * 3, torch.full((2,), 3.0))
