"""torch's functions as generated code calls them, also where somebody replaced some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quintnet_compiler.compat.torch_codegen import SHIPPED, is_as_shipped, reads_shipped, torch_with_linear
from quintnet_compiler.passes.codegen.python_ops import SPELLING, spelled

_aten = torch.ops.aten


def _three(*_: Any) -> Tensor:
    return torch.tensor(3.0)


def test_functions_stay_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("x"),)))
    plain, shipped = fx.GraphModule({}, graph), reads_shipped(fx.GraphModule({}, graph))
    x, sin = torch.tensor(0.5), torch.sin
    assert SHIPPED.sin is sin and is_as_shipped(sin)
    monkeypatch.setattr(torch, "sin", _three)
    assert SHIPPED.sin is sin and not is_as_shipped(sin)
    assert plain(x) == 3.0 and shipped(x) == sin(x)


def test_a_replaced_function_is_called_as_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spelled(_aten.sin.default) is SPELLING[_aten.sin.default] is torch.sin
    monkeypatch.setattr(torch, "sin", _three)
    assert spelled(_aten.sin.default) is _aten.sin.default


def test_another_linear() -> None:
    other = torch_with_linear(_three)
    assert other._C._nn.linear is _three and other._C._nn.gelu is torch._C._nn.gelu and other.mm is torch.mm
    assert SHIPPED._C._nn.linear is torch._C._nn.linear is not _three
