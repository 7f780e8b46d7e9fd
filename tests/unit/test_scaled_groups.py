"""Grouped products of 8-bit numbers, and scales of experts' rows, each against a loop over rows in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quintnet_compiler.features.fp8.eight_bits import RECIPES
from quintnet_compiler.features.fp8.ops.scaled_groups import (
    group_cast,
    group_max,
    scaled_expert_linear,
    scaled_grouped_linear,
    scaled_grouped_weight_grad,
)
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast, spread

E4M3 = torch.float8_e4m3fn
SIZES = [5, 0, 33, 16, 2]  # rows of each expert; rows of none are behind
EXPERTS, ROWS, OUT, IN = len(SIZES), sum(SIZES), 48, 32


def _ends() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).int()


def _expert(row: int) -> int:
    return int((_ends() <= row).sum())


def _rows(features: int, seed: int) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    found = torch.randn(ROWS + 7, features, generator=dice)
    found[ROWS:] = 1e6  # nothing may read it
    return found


def _cast(x: Tensor, block: list[int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    scale = block_scale(block_max(x, block), E4M3, power_of_two)
    return scaled_cast(x, scale, E4M3), scale


def test_each_column_of_an_experts_rows_has_its_largest_number() -> None:
    x = _rows(OUT, 0)
    largest = group_max(x, _ends())
    for expert in range(EXPERTS):
        mine = [row for row in range(ROWS) if _expert(row) == expert]
        expected = x[mine].abs().amax(0) if mine else torch.zeros(OUT)
        assert torch.equal(largest[expert], expected)
    scale = block_scale(largest, E4M3, True)
    x8 = group_cast(x, _ends(), scale, E4M3)
    for row in range(ROWS):
        assert torch.equal(x8[row].float(), (x[row] / scale[_expert(row)]).clamp(-448, 448).to(E4M3).float())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("of_rows", "of_matrices"),
    [([0, 0], [1, 0, 0]), ([1, 0], [1, 1, 0]), ([1, 16], [1, 1, 16]), ([1, 16], [1, 16, 16])],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_each_row_meets_the_matrix_of_its_expert(
    biased: bool, of_rows: list[int], of_matrices: list[int], transposed: bool
) -> None:
    x8, scale_x = _cast(_rows(IN, 0), of_rows)
    weight = torch.randn(EXPERTS, OUT, IN)
    w8, scale_w = _cast(weight, of_matrices)
    bias = torch.randn(EXPERTS, OUT, dtype=torch.float64) if biased else None
    turned = [x.transpose(1, 2).contiguous() if transposed else x for x in (w8, scale_w)]
    made = scaled_grouped_linear(x8, _ends(), turned[0], scale_x, turned[1], bias, transposed, torch.float64)
    assert made.dtype is torch.float64 and made.shape == (ROWS + 7, OUT)
    x, w = (x8.double() * spread(one.double(), x8.shape) for x8, one in ((x8, scale_x), (w8, scale_w)))
    for i in range(ROWS):
        expected = w[_expert(i)] @ x[i] + (bias[_expert(i)] if bias is not None else 0)
        assert torch.allclose(made[i], expected, rtol=1e-12, atol=1e-12)


def _columns(x: Tensor, row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """8-bit numbers, their scales, and what both stand for: a scale for each column of an expert's rows, or one."""
    largest = group_max(x, _ends())
    scale = block_scale(largest if row else block_max(largest, [0, 0]), E4M3, False)
    x8 = group_cast(x, _ends(), scale, E4M3) if row else scaled_cast(x, scale, E4M3)
    each = torch.stack([scale[_expert(i) if row else 0].double().expand(x.shape[1]) for i in range(ROWS)])
    return x8, scale, x8[:ROWS].double() * each


def _sums(left: Tensor, right: Tensor) -> Tensor:
    found = torch.zeros(EXPERTS, left.shape[1], right.shape[1], dtype=torch.float64)
    for i in range(ROWS):
        found[_expert(i)] += left[i][:, None] * right[i]
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("row", [False, True])
def test_a_gradient_of_weights_adds_up_over_the_rows_of_an_expert(row: bool, transposed: bool) -> None:
    grad8, scale_grad, grad = _columns(_rows(OUT, 0), row)
    x8, scale_x, x = _columns(_rows(IN, 1), row)
    made = scaled_grouped_weight_grad(grad8, x8, _ends(), scale_grad, scale_x, transposed, torch.float64)
    expected = _sums(grad, x)
    assert torch.allclose(made, expected.transpose(1, 2) if transposed else expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", [False, True])
def test_a_layer_of_experts_in_8_bits(row: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    rows, ids = torch.randn(20, IN, generator=dice), torch.randint(-1, 3, (20,), generator=dice)
    weight = torch.randn(3, OUT, IN, generator=dice)
    w8, scale = _cast(weight, [1, 1, 0] if row else [1, 0, 0])
    rest = w8, scale, w8, scale, [0, 0] if row else [], E4M3, False, True
    made = scaled_expert_linear(rows, ids, weight, None, False, *rest)
    mine = ids >= 0
    x8, scale_x = _cast(rows[mine], [1, 0] if row else [0, 0])
    right = (w8.double() * scale.double())[ids[mine]]
    expected = torch.einsum("ri,roi->ro", x8.double() * scale_x.double(), right)
    assert torch.allclose(made[mine].double(), expected, rtol=1e-5, atol=1e-5) and not made[~mine].any()


def test_products_are_as_far_from_float64_as_torchaos() -> None:
    """Its MXFP8 layer of experts, in bfloat16 and without a GPU's kernels."""
    theirs = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm")
    emulated = pytest.importorskip("torchao.quantization.quantize_.common").KernelPreference.EMULATED
    dice, count, recipe = torch.Generator().manual_seed(0), torch.tensor([50, 7, 0, 39]), RECIPES["mxfp8"]
    ends, of = count.cumsum(0).int(), torch.arange(4).repeat_interleave(count)
    x, t = (torch.randn(len(of), n, generator=dice) * torch.randn(len(of), 1, generator=dice).exp() for n in (96, 64))
    x, t, w = x.bfloat16(), t.bfloat16(), (torch.randn(4, 64, 96, generator=dice) / 10).bfloat16()
    exact = (
        torch.einsum("ri,roi->ro", x.double(), w[of].double()),
        torch.einsum("ro,roi->ri", t.double(), w[of].double()),
        torch.stack([t[of == e].double().T @ x[of == e].double() for e in range(4)]),
    )
    rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    layer = theirs._to_mxfp8_then_scaled_grouped_mm
    made = layer(rows, weight.transpose(1, 2), ends, kernel_preference=emulated, pad_token_groups_for_grouped_mm=True)
    made.backward(t)
    low = torch.bfloat16
    (x8, scale_x), (t8, scale_t) = (
        _cast(y, recipe.block(one, y.shape, 1), True)
        for one, y in (("input", x), ("gradient", t))  # type: ignore[arg-type]
    )
    forward, back = (_cast(w, recipe.block("weight", w.shape, dim), True) for dim in (2, 1))
    columns = []
    for y in (t, x):
        scale = block_scale(group_max(y, ends), E4M3, True)
        columns.append((group_cast(y, ends, scale, E4M3), scale))
    (ct, scale_ct), (cx, scale_cx) = columns
    ours = (
        scaled_grouped_linear(x8, ends, forward[0], scale_x, forward[1], None, False, low),
        scaled_grouped_linear(t8, ends, back[0], scale_t, back[1], None, True, low),
        scaled_grouped_weight_grad(ct, cx, ends, scale_ct, scale_cx, False, low),
    )
    for mine, their, right in zip(ours, (made, rows.grad, weight.grad), exact, strict=True):
        assert (mine.double() - right).norm() <= 1.001 * (their.double() - right).norm() < 0.06 * right.norm()
