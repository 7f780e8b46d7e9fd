"""compat.torch_register_sharding, ops.rules.registered: rules from DTensor's ``register_sharding``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import quintnet
from quintnet_compiler.compat.torch_register_sharding import registered_shardings, spec_of_whole
from quintnet_compiler.ops.rules.registered import registered_rules

whole = Replicate()


@torch.library.custom_op("registered::scaled", mutates_args=())
def scaled(x: Tensor, scale: float, weight: Tensor) -> Tensor:
    """Return ``scale * x @ weight`` of rows [n, k] and a weight [k, m]."""
    return scale * (x @ weight)


@scaled.register_fake
def _(x: Tensor, scale: float, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


scaled.register_autograd(
    lambda ctx, gradient: (scaled(gradient, ctx.scale, ctx.weight.T), None, scaled(ctx.x.T, ctx.scale, gradient)),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(x=inputs[0], scale=inputs[1], weight=inputs[2]),
)


def _product(x: Any, scale: float, weight: Any) -> list[Any]:
    """Return the shardings of a product: by rows, by columns, and by what it sums over."""
    assert (x.ndim, weight.ndim, scale) == (2, 2, 0.5)
    return [
        ([whole], [whole, None, whole]),
        ([Shard(0)], [Shard(0), None, whole]),
        ([Shard(-1)], [whole, None, Shard(1)]),
        ([Partial()], [Shard(1), None, Shard(0)]),
        ([Shard(0)], [Shard(0), None, whole]),  # again
    ]


@pytest.fixture
def register() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Yield what registers a function for ``scaled``; it is removed at the end."""
    yield lambda function: register_sharding(torch.ops.registered.scaled.default)(function) and None
    strategies: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    strategies.pop(torch.ops.registered.scaled.default, None)


class Scaled(nn.Module):
    """A layer of the operator between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(scaled(torch.relu(self.first(x)), 0.5, self.weight)))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_program_trains_as_the_module(axes: dict[str, int], register: Callable[[Callable[..., Any]], None]) -> None:
    register(_product)
    assert registered_shardings()[torch.ops.registered.scaled.default] is _product
    model = Scaled().double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    F.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    program = quintnet.compile(model, quintnet.Mesh(**axes), batch, loss_fn=F.cross_entropy)
    program.step(batch)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-9, rtol=1e-9)


def test_without_a_registration_there_is_no_rule() -> None:
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    assert torch.ops.registered.scaled.default not in registered_rules()
    with pytest.raises(quintnet.CompileError, match="QN202"):
        quintnet.compile(Scaled(), quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy)


def test_placements_of_another_number_of_arguments_are_refused(
    register: Callable[[Callable[..., Any]], None],
) -> None:
    register(lambda x, scale, weight: [([Shard(0)], [Shard(0)])])
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    with pytest.raises(quintnet.CompileError, match="1 placements for 3 arguments"):
        quintnet.compile(Scaled(), quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy)


def test_a_wrong_registration_is_found(register: Callable[[Callable[..., Any]], None]) -> None:
    register(lambda x, scale, weight: [([Shard(1)], [Shard(1), None, whole])])
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    with pytest.raises(quintnet.QuintNetError):
        quintnet.compile(Scaled(), quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy).step(batch)


def test_a_tensor_is_shown_by_its_shape() -> None:
    spec = spec_of_whole(torch.empty(2, 3))
    assert (spec.ndim, tuple(spec.shape)) == (2, (2, 3))
