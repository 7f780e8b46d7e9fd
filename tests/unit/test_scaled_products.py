"""Operators and rules of 8-bit products, and what moves 8-bit numbers between ranks, each against a plain formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintnet_compiler.features.fp8.eight_bits import RECIPES
from quintnet_compiler.features.fp8.ops import rules, scaled_kernels
from quintnet_compiler.features.fp8.ops.scaled_products import (
    FORWARD,
    OF_INPUT,
    OF_WEIGHT,
    block_max,
    block_scale,
    blocks_of,
    scaled_cast,
    scaled_matmul,
)
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.runtime.transport.narrow import as_bytes, is_narrow, moved_as_bytes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _scaled(x: Tensor, block: list[int], dtype: torch.dtype, power: bool = False) -> tuple[Tensor, Tensor]:
    scale = block_scale(block_max(x, block), dtype, power)
    return scaled_cast(x, scale, dtype), scale


def _dense(x8: Tensor, scale: Tensor) -> Tensor:
    """What 8-bit numbers stand for, number by number."""
    out = x8.double()
    for place in torch.cartesian_prod(*(torch.arange(n) for n in x8.shape)).tolist():
        of = tuple(i * s // n for i, n, s in zip(place, x8.shape, scale.shape, strict=True))
        out[tuple(place)] *= scale[of].double()
    return out


@pytest.mark.parametrize("block", [[0, 0], [1, 0], [0, 1], [1, 4], [2, 4]])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_numbers_of_a_block_use_all_of_the_format(block: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64) * torch.logspace(-3, 3, 4, dtype=torch.float64)[:, None]
    x8, scale = _scaled(x, block, dtype)
    rows, columns = (n if b == 1 else n // b if b else 1 for n, b in zip(x.shape, block, strict=True))
    assert scale.shape == (rows, columns) and x8.dtype is dtype and scale.dtype is torch.float32
    largest = x8.double().abs().reshape(rows, 4 // rows, columns, 8 // columns).amax((1, 3))
    assert (largest == torch.finfo(dtype).max).all()
    step = torch.finfo(dtype).eps / 2
    worst = (_dense(x8, scale) - x).abs()
    below = scale.double().repeat_interleave(4 // rows, 0).repeat_interleave(8 // columns, 1)
    assert (worst <= step * x.abs() + below * torch.finfo(dtype).smallest_normal).all()


def test_scales_that_are_powers_of_two_never_overflow() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32) * 1e3
    x8, scale = _scaled(x, [1, 0], E4M3, True)
    assert (torch.log2(scale) == torch.log2(scale).round()).all()
    assert (x8.float().abs().amax(1) >= torch.finfo(E4M3).max / 2).all()
    zeros, one = _scaled(torch.zeros(2, 4), [1, 0], E4M3)
    assert (zeros.float() == 0).all() and (one > 0).all()


@pytest.mark.parametrize(
    ("equation", "a", "b", "blocks"),
    [
        ("mk,nk->mn", (2, 3, 8), (4, 8), ([0, 0, 0], [0, 0])),
        ("mk,nk->mn", (6, 8), (4, 8), ([1, 0], [1, 0])),
        ("mk,nk->mn", (2, 3, 8), (4, 8), ([1, 1, 4], [2, 4])),
        ("mn,nk->mk", (2, 3, 4), (4, 8), ([1, 1, 2], [2, 1])),
        ("mn,mk->nk", (2, 4, 6), (2, 4, 8), ([0, 0, 1], [0, 0, 1])),
        ("mn,mk->nk", (2, 4, 6), (2, 4, 8), ([1, 2, 1], [1, 2, 1])),
    ],
)
def test_a_product_is_that_of_what_the_numbers_stand_for(
    equation: str, a: tuple[int, ...], b: tuple[int, ...], blocks: tuple[list[int], list[int]]
) -> None:
    (a8, scale_a), (b8, scale_b) = (_scaled(torch.randn(n), one, E4M3) for n, one in zip((a, b), blocks, strict=True))
    letters = equation.replace("m", "...") if len(a) > 2 and "->m" in equation else equation
    left, right = _dense(a8, scale_a), _dense(b8, scale_b)
    if equation == "mn,mk->nk":
        left, right = left.flatten(0, -2), right.flatten(0, -2)
    expected = torch.einsum(letters, left, right)
    made = scaled_matmul(a8, b8, scale_a, scale_b, equation, torch.float64)
    assert made.shape == expected.shape and torch.allclose(made, expected, rtol=1e-12, atol=1e-12)
    assert scaled_matmul(a8, b8, scale_a, scale_b, equation, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("rows", [1, 10, 32])
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize(("equation", "k", "n"), [(FORWARD, 32, 48), (OF_INPUT, 32, 48), (OF_WEIGHT, 32, 48)])
def test_the_kernel_of_8_bit_products_is_called_as_it_wants(
    equation: str, k: int, n: int, row: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_scaled_mm`` on the CPU; sums over rows that are no multiple of 16 are not its."""
    monkeypatch.setattr(scaled_kernels, "kernels_of", lambda device: frozenset({"rows"}))
    calls: list[tuple[int, ...]] = []
    kernel = torch.ops.aten._scaled_mm.default

    def spy(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(a.shape))
        assert a.is_contiguous() and b.t().is_contiguous() and all(s.is_contiguous() for s in rest[:2])
        found: Tensor = kernel(a, b, *rest)
        return found

    fake = SimpleNamespace(_scaled_mm=SimpleNamespace(default=spy))
    monkeypatch.setattr(scaled_kernels, "aten", fake)
    sizes = {FORWARD: ((rows, k), (n, k)), OF_INPUT: ((rows, n), (n, k)), OF_WEIGHT: ((rows, n), (rows, k))}[equation]
    summed = {FORWARD: (1, 1), OF_INPUT: (1, 0), OF_WEIGHT: (0, 0)}[equation]
    blocks = [[0 if not row or dim == one else 1 for dim in range(2)] for one in summed]
    (a8, scale_a), (b8, scale_b) = (_scaled(torch.randn(s), b, E4M3) for s, b in zip(sizes, blocks, strict=True))
    made = scaled_matmul(a8, b8, scale_a, scale_b, equation, torch.bfloat16)
    expected = torch.einsum(equation, _dense(a8, scale_a), _dense(b8, scale_b))
    assert bool(calls) == (equation != OF_WEIGHT or rows % 16 == 0)
    assert (made.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_16_bits_have_all_8_bit_numbers_times_powers_of_two(dtype: torch.dtype) -> None:
    """From the least scale that there is; so such products need no 32 bits."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    every = every[every.float().isfinite()][:, None]
    least = float(block_scale(torch.zeros(1, 1), dtype, True))
    scale = torch.tensor([[least * 2.0**i for i in range(0, 150, 7)]])
    made = every.bfloat16() * scale.bfloat16()
    assert torch.equal(made.double(), every.double() * scale.double())


def test_no_rows_have_a_scale_and_a_product() -> None:
    for block in ([0, 0], [1, 0], [0, 1], [1, 4]):
        x8, scale = _scaled(torch.randn(0, 8), block, E4M3)
        assert list(scale.shape) == blocks_of((0, 8), block)
    (w8, one), (x8, scale) = _scaled(torch.randn(4, 8), [1, 0], E4M3), _scaled(torch.randn(0, 8), [1, 0], E4M3)
    assert scaled_matmul(x8, w8, scale, one, FORWARD, torch.float32).shape == (0, 4)


def test_blocks_of_recipes() -> None:
    assert RECIPES["tensorwise"].block("weight", (64, 32), 1) == [0, 0]
    assert RECIPES["rowwise"].block("input", (2, 8, 32), 2) == [1, 1, 0]
    assert RECIPES["rowwise"].block("gradient", (2, 8, 32), 0, rows=2) == [0, 0, 1]
    assert RECIPES["blockwise"].block("weight", (256, 128), 1) == [128, 0]
    assert RECIPES["mxfp8"].block("input", (2, 64, 96), 0, rows=2) == [1, 32, 1]


def test_every_operator_has_its_rule() -> None:
    for target in (block_max, scaled_cast, scaled_matmul):
        assert RULES[target].factors is getattr(rules, target.overloadpacket.__name__)


def test_numbers_travel_as_bytes() -> None:
    seen = []

    def echo(x: object, *how: object, later: bool = False) -> object:
        seen.append(x)
        return lambda: x

    x8 = torch.randn(6).to(E5M2)
    assert is_narrow(E5M2) and not is_narrow(torch.uint8) and as_bytes(torch.ones(2)).dtype is torch.float32
    back = moved_as_bytes(echo)(x8, "tp", later=True)()
    several = moved_as_bytes(echo)([x8, x8])()
    assert back.dtype is E5M2 and torch.equal(as_bytes(back), as_bytes(x8)) and len(several) == 2
    assert all(one.dtype is torch.uint8 for one in (seen[0], *seen[1]))
    plain = torch.ones(2)
    assert moved_as_bytes(echo)(plain)() is plain and seen[-1] is plain
