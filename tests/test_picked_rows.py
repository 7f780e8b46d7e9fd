"""Rows that forward picks by value: loops over experts and boolean masks, as people write them, exact on layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

EXPERTS, WIDTH = 3, 4
Body = Callable[["Experts", Tensor], Tensor]


class Experts(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.gate = body, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()

    def routed(self, x: Tensor) -> Any:
        return self.gate(x).softmax(-1).max(-1)


def mixtral(net: Experts, x: Tensor) -> Tensor:
    """transformers 4.36 to 4.50 (modeling_mixtral.py)."""
    flat = x.view(-1, x.shape[-1])
    weights, ids = torch.topk(net.gate(flat).softmax(1), 2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros((flat.shape[0], x.shape[-1]), dtype=x.dtype, device=x.device)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        idx, top = torch.where(mask[e])
        current = flat[None, top].reshape(-1, x.shape[-1])
        out.index_add_(0, top, (net.experts[e](current) * weights[top, idx, None]).to(x.dtype))
    return out.reshape(x.shape)


def masks(net: Experts, x: Tensor) -> Tensor:
    weight, chosen = net.routed(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(net.experts):
        mine = chosen == e
        out[mine] = expert(x[mine]) * weight[mine].unsqueeze(-1)
    return out


def tokens(net: Experts, x: Tensor) -> Tensor:
    weight, chosen = net.routed(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(net.experts):
        i, j = (chosen == e).nonzero(as_tuple=True)
        out[i, j] = expert(x[i, j]) * weight[i, j, None]
    return out


def columns(net: Experts, x: Tensor) -> Tensor:
    weight, chosen = net.routed(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(net.experts):
        rows = (chosen == e).nonzero().squeeze(-1)
        out = out.index_add(0, rows, expert(x.index_select(0, rows)) * weight[rows][:, None], alpha=0.5)
    return out


def numbers(net: Experts, x: Tensor) -> Tensor:
    """A row may have one expert twice: its terms are added; the place itself is a number."""
    ids = (x[:, :2] * 2).long().clamp(0, 2)
    out = net.gate(x).sum(-1, keepdim=True).expand(x.shape).clone()
    for e, expert in enumerate(net.experts):
        row, way = torch.where(ids == e)
        out.index_put_((row,), expert(x[row]) * (way[:, None] + 1), accumulate=True)
    return out


def logarithms(net: Experts, x: Tensor) -> Tensor:
    """What is not picked has neither logarithms nor derivatives that are numbers, and there is no number in it."""
    positive, out = x > 0, torch.zeros_like(x)
    out[positive] = torch.log(x[positive])
    whole = torch.where(x > 1, torch.nan, x)
    rows = whole.isfinite().all(-1).nonzero()[:, 0]
    logs = net.experts[0](torch.log(net.gate(whole[rows]).square())[:, :1].expand(-1, WIDTH))
    return net.experts[1](out).index_add(0, rows, logs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("body", [mixtral, masks, tokens, columns, numbers, logarithms])
def test_gradients_are_the_modules(body: Body, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    net = Experts(body).double()
    x = torch.randn(8, 3, WIDTH, dtype=torch.float64)
    x = x if body in (mixtral, tokens) else x[:, 0]
    loss = net(x)
    wanted = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    program = quintnet.compile(net, Mesh(**axes), (x,), microbatches=1 if "tp" in axes else 2)
    assert torch.allclose(program.step((x,)).detach(), loss.detach(), rtol=1e-12)
    for (name, p), gradient in zip(net.named_parameters(), wanted, strict=True):
        found, gradient = (torch.zeros_like(p) if g is None else g for g in (p.grad, gradient))
        assert torch.allclose(found, gradient, rtol=1e-10, atol=1e-13), name


def _returned(net: Experts, x: Tensor) -> Tensor:
    return net.gate(x[x[:, 0] > 0])


def _in_order(net: Experts, x: Tensor) -> Tensor:
    mine, out = x[:, 0] > 0, torch.zeros_like(x)
    out[mine] = x[mine].cumsum(0)
    return net.gate(out)


def _one_place(net: Experts, x: Tensor) -> Tensor:
    row, way = torch.where((x[:, :2] * 2).long() == 0)
    out = torch.zeros_like(x)
    out[row] = net.experts[0](x[row]) * way[:, None]
    return out


def _count(net: Experts, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return net.gate(x.index_add(0, rows, x[rows] / rows.shape[0]))


@pytest.mark.parametrize("body", [_returned, _in_order, _one_place, _count])
def test_what_brings_picked_rows_together_is_refused(body: Body) -> None:
    with pytest.raises(quintnet.CompileError, match=r"depends on the values of a tensor[\s\S]*use a mask") as error:
        quintnet.compile(Experts(body), Mesh(dp=2), (torch.randn(8, WIDTH),))
    assert error.value.code == "QN101" and "test_picked_rows.py" in error.value.where.source
