"""runtime.state.products: terms of 16-bit factors are added to float32 gradients unrounded, where a kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.compat.torch import has_kernel, implementations_of_aten
from quintnet_compiler.runtime.state.products import add_product, adds_up, put_product

aten = torch.ops.aten


@pytest.fixture
def kernels() -> Iterator[list[str]]:
    """What stands in for CUDA's kernels, which sum products of 16-bit factors in float32; the names of those called."""
    called: list[str] = []

    def product(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        called.append("put")
        return out.copy_(left.float() @ right.float())

    def added(
        slot: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: int = 1, alpha: int = 1, out: Tensor
    ) -> Tensor:
        called.append("add")
        assert out is slot and (beta, alpha) == (1, 1)
        return out.add_(left.float() @ right.float())

    with implementations_of_aten() as library:
        for name in ("mm.dtype_out", "bmm.dtype_out"):
            library.impl(name, product, "CPU")
        for name in ("addmm.dtype_out", "baddbmm.dtype_out"):
            library.impl(name, added, "CPU")
        yield called


def test_a_cpu_has_no_such_kernel() -> None:
    slot, factor = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    assert has_kernel(aten.mm.default, torch.device("cpu")) and adds_up(slot, torch.zeros(2, 2))
    assert not adds_up(slot, factor) and not adds_up(slot.double(), torch.zeros(2, 2))


@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrices", "batches"])
def test_terms_are_not_rounded(kernels: list[str], lead: tuple[int, ...]) -> None:
    """At least as near to float64 as terms that are rounded first."""
    torch.manual_seed(0)
    factors = torch.randn(8, 2, *lead, 16, 16).bfloat16()
    slot = torch.full((*lead, 16, 16), float("nan"))
    assert adds_up(slot, factors)
    put_product(slot, *factors[0])
    for left, right in factors[1:]:
        add_product(slot, left, right)
    exact = sum(left.double() @ right.double() for left, right in factors)
    rounded = sum((left @ right).float() for left, right in factors)
    assert isinstance(exact, Tensor) and isinstance(rounded, Tensor)
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (slot, rounded)]
    assert errors[0] < 1e-6 < 5e-4 < errors[1]
    assert kernels == ["put", *["add"] * 7]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "options"), [({}, {}), ({"dp": 2}, {"zero": 1}), ({"tp": 2}, {})], ids=str)
def test_a_programs_gradients_are_nearer(
    request: pytest.FixtureRequest, axes: dict[str, int], options: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    batch = (torch.randn(64, 64), torch.randn(64, 64))

    def gradients(model: nn.Module, *, exact: bool) -> list[Tensor]:
        given = tuple(x.double() if exact else x for x in batch)
        how: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": 4, "check": "off", **options}
        how |= {} if exact else {"precision": "bf16"}
        program = quintnet.compile(model, quintnet.Mesh(**axes), given, **how)
        program.step(given)
        return [p.grad.full_tensor().double() for p in program.parameters()]  # type: ignore[union-attr]

    def copied() -> nn.Module:
        made = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
        made.load_state_dict(model.state_dict())
        return made

    exact, rounded = gradients(copied().double(), exact=True), gradients(copied(), exact=False)
    called: list[str] = request.getfixturevalue("kernels")
    found = gradients(copied(), exact=False)
    assert called.count("put") and called.count("add") == 3 * called.count("put")
    for mine, before, right in zip(found, rounded, exact, strict=True):
        assert float((mine - right).norm()) < float((before - right).norm())
