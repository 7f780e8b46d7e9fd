"""Kernels of GPUs for 8-bit products: which is chosen, and that it gets scales as it wants them, read one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from quintnet_compiler.features.fp8.eight_bits import RECIPES, Operand
from quintnet_compiler.features.fp8.ops import scaled_kernels
from quintnet_compiler.features.fp8.ops.scaled_kernels import kernel_for, kernels_of, multiply, swizzled
from quintnet_compiler.features.fp8.ops.scaled_products import (
    FORWARD,
    OF_INPUT,
    OF_WEIGHT,
    block_max,
    block_scale,
    scaled_cast,
    scaled_matmul,
)

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("capability", "cuda", "expected"),
    [
        ((8, 0), "12.9", set()),
        ((8, 9), "13.0", {"rows"}),
        ((9, 0), "12.8", {"rows"}),
        ((9, 0), "12.9", {"rows", "128"}),
        ((10, 0), "12.8", {"rows", "32"}),
        ((12, 0), "13.0", {"rows", "32"}),
        ((9, 4), None, {"rows"}),  # ROCm
    ],
)
def test_what_a_device_has(
    capability: tuple[int, int], cuda: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert kernels_of(torch.device("cuda")) == expected and kernels_of(torch.device("cpu")) == set()


ALL = frozenset({"rows", "128", "32"})


@pytest.mark.parametrize(
    ("m", "k", "n", "scale_a", "scale_b", "power_of_two", "expected"),
    [
        (256, 512, 256, (1, 1), (1, 1), False, "rows"),
        (250, 512, 256, (250, 1), (1, 256), False, "rows"),
        (128, 128, 128, (128, 1), (1, 1), False, "rows"),
        (256, 512, 256, (256, 4), (4, 2), False, "128"),
        (256, 512, 256, (2, 4), (4, 256), False, "128"),
        (256, 512, 256, (256, 4), (4, 256), True, "128"),
        (256, 128, 256, (256, 1), (1, 2), False, "128"),  # a square of a weight is no scale of a column
        (254, 512, 256, (254, 4), (4, 256), False, None),
        (256, 512, 192, (256, 4), (4, 2), False, None),  # squares of 96
        (256, 512, 256, (2, 4), (4, 2), False, None),
        (256, 64, 256, (256, 2), (2, 256), True, "32"),
        (256, 64, 256, (256, 2), (2, 256), False, None),  # its scales could not be told
        (256, 96, 256, (256, 2), (2, 256), True, None),
        (256, 40, 256, (256, 1), (1, 256), False, None),
        (0, 512, 256, (0, 4), (4, 256), False, None),
    ],
)
def test_which_kernel_is_chosen(
    m: int, k: int, n: int, scale_a: tuple[int, int], scale_b: tuple[int, int], power_of_two: bool,
    expected: str | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(scaled_kernels, "kernels_of", lambda device: ALL)
    given = torch.empty(m, k), torch.empty(k, n), torch.empty(scale_a), torch.empty(scale_b)
    assert kernel_for(*given, torch.bfloat16, power_of_two) == expected
    assert kernel_for(*given, torch.float32, power_of_two) is None
    monkeypatch.setattr(scaled_kernels, "kernels_of", lambda device: ALL - {expected})
    assert kernel_for(*given, torch.bfloat16, power_of_two) is None


def _of_128(scale: Tensor, kind: ScalingType, row: int, column: int, rows: int, columns: int) -> float:
    """The scale of a number of an operand [rows, columns], where cuBLAS looks for it."""
    assert scale.dtype is torch.float32 and scale.stride(0) == 1
    along = -(-columns // 128)
    if kind == ScalingType.BlockWise1x128:
        assert scale.shape == (rows, along) and scale.stride(1) == rows
        return float(scale[row, column // 128])
    four = -(-along // 4) * 4
    assert kind == ScalingType.BlockWise128x128 and scale.shape == (four, -(-rows // 128)) and scale.stride(1) == four
    return float(scale[column // 128, row // 128])


def _of_32(scale: Tensor, row: int, column: int, columns: int) -> float:
    """Likewise: tiles of 128 rows and 4 scales of each."""
    block = column // 32
    tile = row // 128 * -(-columns // 128) + block // 4
    return float(scale[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4].float())


class Kernel:
    """What ``torch.nn.functional.scaled_mm`` computes."""

    calls = 0

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, kind_a: ScalingType, scale_b: Tensor, kind_b: ScalingType,
        swizzle_a: SwizzleType | None = None, swizzle_b: SwizzleType | None = None, *, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        assert a.is_contiguous() and b.t().is_contiguous()
        wide = []
        for x, scale, kind, order in ((a, scale_a, kind_a, swizzle_a), (b.t(), scale_b, kind_b, swizzle_b)):
            each = torch.empty(x.shape, dtype=torch.float64)
            for row, column in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(0, x.shape[1], 32)).tolist():
                if kind == ScalingType.BlockWise1x32:
                    assert order == SwizzleType.SWIZZLE_32_4_4 and scale.dtype is torch.float8_e8m0fnu
                    found = _of_32(scale, row, column, x.shape[1])
                else:
                    found = _of_128(scale, kind, row, column, *x.shape)
                each[row, column : column + 32] = found
            wide.append(x.double() * each)
        return (wide[0] @ wide[1].T).to(output_dtype)


@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        (FORWARD, ("input", "weight")),
        (OF_INPUT, ("gradient", "weight")),
        (OF_WEIGHT, ("gradient", "input")),
    ],
)
@pytest.mark.parametrize(("recipe", "lead"), [("blockwise", (256,)), ("blockwise", (2, 128)), ("mxfp8", (3, 64))])
def test_a_product_by_blocks_is_that_of_what_they_stand_for(
    recipe: str,
    lead: tuple[int, ...],
    equation: str,
    operands: tuple[Operand, Operand],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    n, k, rows = 128, 384, len(lead)
    tensors = {"input": torch.randn(*lead, k), "weight": torch.randn(n, k), "gradient": torch.randn(*lead, n)}
    dims = {FORWARD: (rows, 1), OF_INPUT: (rows, 0), OF_WEIGHT: (0, 0)}[equation]
    cast = []
    for name, dim in zip(operands, dims, strict=True):
        x, many = tensors[name], rows if equation == OF_WEIGHT else 1
        block = RECIPES[recipe].block(name, x.shape, dim, rows=many)
        scale = block_scale(block_max(x, block), E4M3, RECIPES[recipe].power_of_two)
        cast.append((scaled_cast(x, scale, E4M3), scale))
    (a, scale_a), (b, scale_b) = cast
    given: Any = a, b, scale_a, scale_b, equation
    expected = scaled_matmul(*given, torch.float64)
    kernel = Kernel()
    monkeypatch.setattr(scaled_kernels, "kernels_of", lambda device: ALL)
    monkeypatch.setattr(scaled_kernels.F, "scaled_mm", kernel)
    made = scaled_matmul(*given, torch.bfloat16, RECIPES[recipe].power_of_two)
    assert kernel.calls == 1 and made.shape == expected.shape
    assert (made.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


@pytest.mark.parametrize(
    ("size_a", "size_b"), [((32, 1), (1, 1)), ((1, 1), (1, 16)), ((32, 1), (1, 16)), ((1, 1), (1, 1))]
)
def test_scales_of_whole_rows_lie_together(
    size_a: tuple[int, int], size_b: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one operand has one scale: its rows have it each. The kernel is written out: PyTorch 2.11's for CPUs
    has one scale alone."""
    seen: list[Tensor] = []

    def spy(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        seen.extend(rest[:2])
        return ((a.double() * rest[0]) @ (b.double() * rest[1])).to(rest[-1])

    monkeypatch.setattr(scaled_kernels, "aten", SimpleNamespace(_scaled_mm=SimpleNamespace(default=spy)))
    a, b = torch.randn(32, 48).to(E4M3), torch.randn(48, 16).to(E4M3)
    scale_a, scale_b = torch.rand(size_a), torch.rand(size_b)
    made = multiply(a, b, scale_a, scale_b, torch.bfloat16, "rows")
    expected = (a.double() * scale_a) @ (b.double() * scale_b)
    assert (made.double() - expected).norm() <= 4e-3 * expected.norm()
    one = size_a == size_b == (1, 1)
    assert [s.shape for s in seen] == ([(1, 1)] * 2 if one else [(32, 1), (1, 16)])
    assert all(s.is_contiguous() for s in seen)


def test_scales_of_32_lie_as_torchao_lays_them() -> None:
    utils: Any = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for size in ((64, 8), (200, 3), (128, 4), (130, 9)):
        scale = torch.exp2(torch.randint(-20, 20, size).float()).to(torch.float8_e8m0fnu)
        assert torch.equal(swizzled(scale).view(torch.uint8), utils.to_blocked(scale.view(torch.uint8)))
