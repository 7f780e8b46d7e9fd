"""Operators of users that write to their arguments, as kernels of libraries do: their functional forms are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])


@torch.library.custom_op("quintnet_writes::sine", mutates_args={"out"})
def sine(x: Tensor, out: Tensor) -> Tensor:
    """Write the sine, and return the cosine."""
    out.copy_(x.sin())
    return x.cos()


@sine.register_fake
def _(x: Tensor, out: Tensor) -> Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("quintnet_writes", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, Tensor y, Tensor(a!)? out, Tensor(b!)[] more, *, float by=1.0) -> Tensor(a!)")  # type: ignore[no-untyped-call]


def _product(x: Tensor, y: Tensor, out: Tensor, more: list[Tensor], *, by: float = 1.0) -> Tensor:
    torch.mul(x, y, out=out)
    for term in more:
        term.add_(out, alpha=by)
    return out


_library.impl("product", _product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
product = torch.ops.quintnet_writes.product.default


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(torch.ops.quintnet_writes.sine(x, out))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        out, twice = torch.empty_like(gradient), torch.zeros_like(gradient)
        same: Tensor = product(gradient, cosine, out, [twice], by=2.0)
        return same * 3 - twice  # the product itself


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor] = Sine.apply) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), middle, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


RULES = [
    quintnet.rule(sine, "b n, b n -> [b n, b n]"),
    quintnet.rule(product, "b n, b n, b n, [b n] -> [b n, b n]"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_operator_that_writes_is_followed_on_all_layouts(layout: str) -> None:
    train_as_plain(Net().double(), layout, [(X, Y), (X + 1, Y)], F.cross_entropy, rules=RULES)


class State(nn.Module):
    """Writes to a buffer, to parts of a new tensor, and to parts of a value."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(24, 5)
        self.register_buffer("seen", torch.zeros(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.quintnet_writes.sine(x.detach(), self.seen)
        h = self.first(x + self.seen)
        wide = h.new_zeros(h.shape[0], 24)
        with torch.no_grad():
            left, middle, right = wide.chunk(3, 1)
            torch.ops.quintnet_writes.sine(h, left)
            product(h, left, middle, [right], by=0.5)
            torch.ops.quintnet_writes.sine(middle, wide[:, :8])
        out: Tensor = self.last(wide + h.repeat(1, 3))
        return out


@pytest.mark.parametrize("layout", ["dp2 tp2 zero3"])
def test_views_and_buffers_are_written_as_in_the_module(layout: str) -> None:
    train_as_plain(State().double(), layout, [(X, Y), (X + 1, Y)], F.cross_entropy, rules=RULES, microbatches=1)


def _same_memory(x: Tensor) -> Tensor:
    with torch.no_grad():
        out = x.clone()
        torch.ops.quintnet_writes.sine(out, out)
    return x + out


def _written_argument(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.quintnet_writes.sine(x, out)
    return out


class WrittenInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.ops.quintnet_writes.sine(x.clone(), x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "code", "text"),
    [
        (Net(_same_memory), "QN105", "writes to 'out' or 'x', which have the same memory"),
        (Net(_written_argument), "QN109", "quintnet_writes.sine.default writes to its arguments, and PyTorch has no"),
        (WrittenInput(), "QN110", "the forward pass changes the input 'batch[0]'"),
    ],
)
def test_what_is_not_followed_is_refused(model: nn.Module, code: str, text: str) -> None:
    with pytest.raises(quintnet.QuintNetError) as refusal:
        quintnet.compile(model.double(), Mesh(dp=1), (X, Y), loss_fn=F.cross_entropy)
    assert refusal.value.code == code
    assert text in refusal.value.message


def test_the_error_and_the_rule_name_the_operator_of_the_user() -> None:
    with pytest.raises(quintnet.QuintNetError, match=r"quintnet_writes.sine.default has no sharding rule"):
        quintnet.compile(Net().double(), Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy, microbatches=2)
    samples = [(torch.randn(4, 6), torch.empty(4, 6)), (torch.randn(2, 5), torch.empty(2, 5))]
    found = quintnet.find_rule(sine, *samples)
    assert str(found) == 'quintnet.rule("quintnet_writes::sine.default", "a b, a b -> a b, a b")'
