"""runtime.execute.host_linears: linear layers of programs that generate, in oneDNN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import quintnet
from quintnet_compiler.compat.torch import packs
from quintnet_compiler.ir.generated import StoredModule
from quintnet_compiler.runtime.backends.local import LocalBackend
from quintnet_compiler.runtime.execute.engines import eager
from quintnet_compiler.runtime.execute.host_linears import HostLinears

from ..test_generation import Plain

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
    (found,) = HostLinears()(_module(CODE), "test")([None, x, w, b])
    (expected,) = eager(_module(CODE), "test")([None, x, w, b])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 1e-13)
    assert HostLinears().few_rows(x[:0], w).shape == F.linear(x[:0], w).shape == (0, 1, 8)


def test_what_has_no_linear_layer_is_as_it_was() -> None:
    module = _module("def forward(self, args):\n  comm, x, = args\n  args.clear()\n  y = torch.neg(x)\n  return (y,)\n")
    (found,) = HostLinears()(module, "test")([None, torch.ones(2)])
    assert found.tolist() == [-1, -1]


def test_programs_without_caches_run_as_they_were() -> None:
    kinds: Any = [SimpleNamespace(state={"x": SimpleNamespace(kind=kind)}) for kind in ("parameter", "cache")]
    linears = HostLinears()
    assert linears.wrap(kinds[0], eager) is eager and linears.wrap(kinds[1], eager) in (eager, linears)
    assert linears.wrap(kinds[1], len) is len  # type: ignore[arg-type, comparison-overlap]


needs_onednn = pytest.mark.skipif(not packs(torch.float32), reason="this PyTorch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_weights_give_the_same_products(dtype: torch.dtype, rows: int) -> None:
    if not packs(dtype):
        pytest.skip("this processor has no such products")
    linears, x, b = HostLinears(), torch.randn(rows, 2, 24).to(dtype), torch.randn(48).to(dtype)
    weights = torch.randn(48, 24).to(dtype), torch.randn(96, 24).to(dtype)[::2]
    with linears.weights_stay(weights):
        for weight in weights * 2:
            expected = F.linear(x.double(), weight.double(), b.double())
            error = (linears.few_rows(x, weight, b) - expected).norm() / expected.norm()
            assert error < 4 * torch.finfo(dtype).eps
        assert linears.packed.keys() == set(map(id, weights))
    assert not linears.packed and not linears.constant


@needs_onednn
def test_only_weights_that_stay_are_packed() -> None:
    linears, weight = HostLinears(), torch.randn(8, 8)
    others = torch.randn(8, 8), torch.randn(8), torch.randn(8, 8, dtype=torch.float64), torch.randn(0, 8)
    with linears.weights_stay([weight, *others[1:]]):
        assert linears.constant.keys() == {id(weight)}
        linears.few_rows(torch.ones(2, 8), others[0])
        assert not linears.packed
        linears.few_rows(torch.ones(2, 8), weight)
        weight.zero_()
        linears.changed()
        assert not linears.few_rows(torch.ones(2, 8), weight).any()


@pytest.mark.slow
@needs_onednn
def test_texts_are_written_with_the_weights_of_the_moment() -> None:
    """They are packed while generate has control, and read anew by the next call."""
    torch.manual_seed(0)
    model = Plain()
    program = quintnet.compile(model, quintnet.Mesh(dp=1), (torch.zeros(2, 4, dtype=torch.int64),) * 2, training=False)
    backend, prompts = program._state(), [torch.tensor([3, 5, 9])]
    assert isinstance(backend, LocalBackend)
    packed, few_rows = list[int](), backend.linears.few_rows

    def counted(*given: Any) -> Any:
        found = few_rows(*given)
        packed.append(len(backend.linears.packed))
        return found

    backend.linears.few_rows = counted  # type: ignore[method-assign]
    first = program.generate(prompts, max_new_tokens=12)[0]
    assert max(packed) == 3 and not backend.linears.packed
    with torch.no_grad():
        for p in program.parameters():
            p.data.copy_(torch.randn(p.shape) * 0.5)  # which no version counts
    second = program.generate(prompts, max_new_tokens=12)[0]
    assert not torch.equal(first, second)
    texts = program.generation(rows=1)
    number = texts.add(prompts[0], max_new_tokens=12)
    while texts.unfinished:  # other code runs between steps: nothing is packed
        texts.step()
        assert not backend.linears.packed
    assert torch.equal(texts.pop(number), second)
