"""Derivatives that the author of a model wrote: equal to the plain module, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintnet
from tests import frontier

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """Two products, and what a test does with the first one's result."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.first, self.last = between, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).square().mean()


def net(between: Callable[[Net, Tensor], Tensor] = lambda _, h: torch.tanh(h)) -> Net:
    torch.manual_seed(0)
    return Net(between).double()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    def between(_: Net, h: Tensor) -> Tensor:
        made: Tensor = checkpoint(torch.tanh, h, use_reentrant=reentrant)
        return made

    frontier.trains_equally(lambda: net(between), (X,))


def test_a_reentrant_checkpoint_of_data_trains_nothing_inside() -> None:
    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True)).square().mean()

    program = quintnet.compile(First(lambda _, h: h).double(), quintnet.Mesh(dp=1), (X,))
    program.step((X,))
    assert [n for n, p in program.named_parameters() if p.grad is not None] == ["last.weight", "last.bias"]


def _hooked(h: Tensor, kind: str) -> Tensor:
    h = torch.tanh(h)
    if not h.requires_grad:
        return h
    if kind == "node":
        assert h.grad_fn is not None
        h.grad_fn.register_hook(lambda *_: None)
    elif kind == "several":
        torch.autograd.graph.register_multi_grad_hook([h], lambda _: None)
    elif kind == "backward":
        h.sum().backward()
    return h


def _packed(_: Net, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2 * x):
        return h.square()


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        (lambda _, h: _hooked(h, "node"), r"grad_fn\.register_hook.*\n.*h\.grad_fn\.register_hook\(lambda"),
        (lambda _, h: _hooked(h, "several"), r"register_hook.*\n.*register_multi_grad_hook\(\[h\]"),
        (lambda _, h: _hooked(h, "backward"), r"Tensor\.backward.*\n.*h\.sum\(\)\.backward"),
        (_packed, r"saved_tensors_hooks.*\n.*with torch\.autograd"),
    ],
)
def test_hooks_that_forward_sets_and_nothing_follows_are_refused(between: Any, cause: str) -> None:
    with pytest.raises(quintnet.CompileError, match=cause) as found:
        quintnet.compile(net(between), quintnet.Mesh(dp=1), (X,))
    assert found.value.code == "QN105"


@pytest.mark.parametrize(
    "hook",
    [
        lambda m: m.first.weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda m: m.first.register_full_backward_hook(lambda *_: None),
        lambda m: m.first.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_hooks_of_parameters_and_modules_that_nothing_follows_are_refused(hook: Any) -> None:
    model = net()
    hook(model)
    with pytest.raises(quintnet.CompileError, match=r"hook of .*\n.*test_frontier_functions") as found:
        quintnet.compile(model, quintnet.Mesh(dp=1), (X,))
    assert found.value.code == "QN105"


def test_forward_hooks_are_part_of_the_program() -> None:
    def build() -> Net:
        model = net()
        model.first.register_forward_pre_hook(lambda _, given: (2 * given[0],))
        model.first.register_forward_hook(lambda *found: found[2].sin())
        return model

    frontier.trains_equally(build, (X,))
