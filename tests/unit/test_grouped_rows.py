"""Rows in the order of their experts, and products of them, beside the same row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quintnet_compiler.ops.experts import grouped_rows
from quintnet_compiler.ops.experts.grouped_rows import (
    group_plan,
    group_rows,
    grouped_bias_grad,
    grouped_linear,
    grouped_weight_grad,
    has_grouped_matmul,
    may_leave_empty_products,
    sort_into,
    ungroup_rows,
    zeros_of_no_rows,
)

IDS = torch.tensor([2, -1, 0, 2, 4, 0, 2])  # nobody chose 1 and 3, and two rows are of no expert


def test_numbers_are_sorted_and_counted() -> None:
    places, ends = sort_into(torch.tensor([2, 0, 2, 5, 0]), 4)
    assert places.tolist() == [1, 4, 0, 2, 3] and ends.tolist() == [2, 2, 4, 4] and ends.dtype is torch.int32
    many = torch.tensor([40000, 7])
    assert sort_into(many, 2**15 + 1)[0].tolist() == [1, 0]


def test_a_plan_orders_rows_by_expert() -> None:
    order, ends = group_plan(IDS, 4, None, True)
    assert order.tolist() == [2, 5, 0, 3, 6, 1, 4] and ends.tolist() == [2, 2, 5, 5]
    counts = torch.tensor([[[0, 0, 0], [0, 0, 0]], [[1, 2, 1], [3, 0, 0]]])  # came from two ranks, for two experts
    assert group_plan(torch.tensor([0, 1, 1, 9, 0, 0, 0]), 2, counts, True)[1].tolist() == [4, 6]


def test_rows_of_no_expert_come_back_as_zeros() -> None:
    x = torch.arange(1.0, 8.0).unsqueeze(1)
    order, ends = group_plan(IDS, 4, None, True)
    grouped = group_rows(x, order, ends)
    grouped[5:] = torch.nan
    assert ungroup_rows(grouped, order, ends).flatten().tolist() == [1, 0, 3, 4, 0, 6, 7]
    order, ends = group_plan(IDS.clamp(0, 3), 4, None, True)
    assert torch.equal(ungroup_rows(group_rows(x, order, ends), order, ends), x)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_each_row(transposed: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, grad, weight, bias = drawn(7, 3), drawn(7, 5), drawn(4, 5, 3), drawn(4, 5) if biased else None
    order, ends = group_plan(IDS, 4, None, True)
    given = weight.mT.contiguous() if transposed else weight
    mine = [n for n, e in enumerate(IDS.tolist()) if 0 <= e < 4]
    grouped, back = (group_rows(x, order, ends) for x in (rows, grad))
    made = ungroup_rows(grouped_linear(grouped, ends, given, bias, transposed), order, ends)
    by_weight = grouped_weight_grad(back, grouped, ends, transposed)
    by_bias = grouped_bias_grad(back, ends)
    for n in mine:
        e = int(IDS[n])
        assert torch.allclose(made[n], weight[e] @ rows[n] + (bias[e] if bias is not None else 0.0))
    for e in range(4):
        some = [n for n in mine if IDS[n] == e]
        expected = grad[some].T @ rows[some]
        assert torch.allclose(by_weight[e], expected.T if transposed else expected)
        assert torch.allclose(by_bias[e], grad[some].sum(0))


def test_where_experts_are_one_kernel() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert has_grouped_matmul(cuda, torch.bfloat16, (64, 8))
    assert not has_grouped_matmul(cpu, torch.bfloat16, (64, 8))
    assert not has_grouped_matmul(cuda, torch.float32, (64, 8))
    assert not has_grouped_matmul(cuda, torch.bfloat16, (64, 4))  # its rows begin at multiples of 16 bytes


@pytest.mark.parametrize(
    ("device", "capability", "cuda", "may"),
    [
        ("cuda", (8, 0), "13.0", False),
        ("cuda", (9, 0), "13.0", False),
        ("cuda", (10, 0), "13.0", True),
        ("cuda", (12, 1), "13.0", True),
        ("cuda", (9, 4), None, True),  # ROCm
        ("xpu", (0, 0), None, True),
    ],
)
def test_products_of_no_rows_are_cleared_where_a_kernel_may_not_write_zeros(
    device: str, capability: tuple[int, int], cuda: str | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert may_leave_empty_products(torch.device(device)) == may


@pytest.mark.parametrize("may", [False, True])
def test_only_products_of_no_rows_are_cleared(may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_rows, "may_leave_empty_products", lambda device: may)
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    made = zeros_of_no_rows(torch.full((4, 2, 3), 7.0), ends)
    assert made.flatten(1).unique(dim=1).flatten().tolist() == ([0.0, 7.0, 0.0, 7.0] if may else [7.0] * 4)
