"""runtime.execute.host_linears: linear layers of programs that generate, in oneDNN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quintnet_compiler.ir.generated import StoredModule
from quintnet_compiler.runtime.execute.engines import eager
from quintnet_compiler.runtime.execute.host_linears import engine_of, few_rows, host_linears

CODE = """def forward(self, args):
  comm, linear, w, b, = args
  args.clear()
  linear_1 = torch._C._nn.linear(linear, w, b)
  y = torch._C._nn.linear(linear_1, w)
  return (y,)
"""


def _module(code: str) -> Any:
    return StoredModule(code, "test", lambda: pytest.fail("compiled"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_function_with_other_calls(dtype: torch.dtype) -> None:
    x, w, b = (
        torch.randn(3, 1, 8, dtype=dtype),
        torch.randn(8, 16, dtype=dtype).t()[:8, :8],
        torch.randn(8, dtype=dtype),
    )
    (found,) = host_linears(_module(CODE), "test")([None, x, w, b])
    (expected,) = eager(_module(CODE), "test")([None, x, w, b])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 1e-13)
    assert torch.allclose(few_rows(x[:0], w), F.linear(x[:0], w)) and few_rows(x[:0], w).shape == (0, 1, 8)


def test_what_has_no_linear_layer_is_as_it_was() -> None:
    module = _module("def forward(self, args):\n  comm, x, = args\n  args.clear()\n  y = torch.neg(x)\n  return (y,)\n")
    (found,) = host_linears(module, "test")([None, torch.ones(2)])
    assert found.tolist() == [-1, -1]


def test_programs_without_caches_run_as_they_were() -> None:
    kinds: Any = [SimpleNamespace(state={"x": SimpleNamespace(kind=kind)}) for kind in ("parameter", "cache")]
    assert engine_of(kinds[0], eager) is eager and engine_of(kinds[1], eager) in (eager, host_linears)
    assert engine_of(kinds[1], len) is len  # type: ignore[arg-type, comparison-overlap]
