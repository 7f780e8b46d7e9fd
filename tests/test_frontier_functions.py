"""Derivatives that the author of a model wrote: equal to the plain module, or refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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


@pytest.mark.sample(1)
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


@pytest.mark.slow
def test_forward_hooks_are_part_of_the_program() -> None:
    def build() -> Net:
        model = net()
        model.first.register_forward_pre_hook(lambda _, given: (2 * given[0],))
        model.first.register_forward_hook(lambda *found: found[2].sin())
        return model

    frontier.trains_equally(build, (X,))


class Straight(torch.autograd.Function):
    """Rounds; its derivative is 1 within a range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return grad * (x.abs() <= ctx.limit), None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.factor * grad, None


class Clipped(torch.autograd.Function):
    """Clips the norm of the gradient of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.clamp(1e-2 / grad.norm(), max=1.0)


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign() * 1e-2


class Product(torch.autograd.Function):
    """linear, with a derivative of its own; a second and a third output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        out = x @ weight.t() + (0 if bias is None else bias)
        signs = out > 0
        ctx.mark_non_differentiable(signs)
        return out, out.square(), signs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, squares: Tensor, _: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad + 0.5 * squares
        return grad @ weight, grad.t() @ x * 2, grad.sum(0) if ctx.needs_input_grad[2] else None


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = Signed.apply(x.sin())
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Reversed.apply(grad * ctx.saved_tensors[0].cos(), 3.0)


class Auxiliary(torch.autograd.Function):
    """Passes x on, and adds a loss to the loss of the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=ctx.dtype)


class Optional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        return 2 * a if b is None else a + b


class Unasked(torch.autograd.Function):
    """Its gradient is that of a sum of squares, whatever arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0]


def _matmul(model: Net, h: Tensor) -> Tensor:
    out, squares, signs = Product.apply(h, model.last.weight, None)
    back = Product.apply(out.tanh() + 0.1 * squares, model.first.weight, model.first.bias)[0]
    return h + torch.where(signs[:, :1], back, h)


FUNCTIONS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "straight through": lambda _, h: Straight.apply(h, 0.5),
    "reversal": lambda _, h: Reversed.apply(torch.tanh(h), 0.3),
    "clipped": lambda _, h: Clipped.apply(torch.tanh(h)),
    "sign": lambda _, h: Signed.apply(torch.tanh(h)),
    "several": _matmul,
    "nested": lambda _, h: Nested.apply(h),
    "twice": lambda _, h: Signed.apply(h) + Straight.apply(h, 1.0).sin() + Reversed.apply(h, 1.0),
    "auxiliary": lambda m, h: Auxiliary.apply(h, m.first.weight.square().mean()),
    "in a checkpoint": lambda _, h: checkpoint(lambda x: Signed.apply(x.sin()), h, use_reentrant=False),
    "quantised weight": lambda m, h: h @ Straight.apply(m.last.weight, 0.3).t() @ m.last.weight,
    "unasked": lambda _, h: Unasked.apply(h),
    "both outputs": lambda _, h: sum(Optional.apply(h)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    frontier.trains_equally(lambda: net(FUNCTIONS[name]), (X,))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["straight through", "several", "nested", "quantised weight"])
def test_functions_of_microbatches_whose_values_are_computed_again(name: str) -> None:
    meshes = {"pp2": {"pp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}
    plan = {"microbatches": 2, "recompute": "full"}
    frontier.trains_equally(lambda: net(FUNCTIONS[name]), (X,), meshes=meshes, plan=plan)


def test_a_backward_that_needs_all_microbatches_is_refused() -> None:
    with pytest.raises(quintnet.CompileError, match=r"vector_norm.*microbatches") as found:
        quintnet.compile(net(FUNCTIONS["clipped"]), quintnet.Mesh(dp=1), (X,), microbatches=2)
    assert found.value.code == "QN104"


class Asked(torch.autograd.Function):
    """Three outputs; its backward is given None for those that nobody uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos(), 2 * x

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> Tensor | None:
        assert b is None
        return c if a is None else 2 * a if c is None else a * c


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "between",
    [
        lambda _, h: Asked.apply(h)[0],
        lambda _, h: Asked.apply(h)[0] * Asked.apply(h.exp())[2] + h,
        lambda _, h: Asked.apply(Asked.apply(h)[0])[1].detach() + h,
    ],
    ids=["one", "two", "none"],
)
def test_gradients_that_a_backward_is_not_given(between: Any) -> None:
    frontier.trains_equally(lambda: net(between), (X,), meshes={"dp2 x tp2": {"dp": 2, "tp": 2}, "pp2": {"pp": 2}})


def _hook(x: Tensor, *functions: Callable[[Tensor], Tensor]) -> list[Any]:
    return [x.register_hook(f) for f in functions if x.requires_grad]


def _used_before(_: Net, h: Tensor) -> Tensor:
    x = torch.tanh(h)
    early = x.sin()
    _hook(x, lambda g: 3 * g, lambda g: g.sign() * 1e-2, torch.tanh)
    return early + x.exp()


def _removed(_: Net, h: Tensor) -> Tensor:
    x = torch.tanh(h)
    _hook(x, lambda g: 2 * g)
    for handle in _hook(x, lambda g: g * (g.shape[0] - 7)):
        handle.remove()
    return x.sin()


def _masked(_: Net, h: Tensor) -> Tensor:
    x = torch.tanh(h)
    mask = x > 0
    _hook(x, lambda g: g * mask)
    return torch.where(mask, x, 2 * x)


HOOKS = {"used before": _used_before, "removed": _removed, "masked": _masked}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_tensors(name: str) -> None:
    frontier.trains_equally(lambda: net(HOOKS[name]), (X,))


@pytest.mark.slow
def test_hooks_of_parameters() -> None:
    class Hooked(Net):
        """A copy that the harness makes of a module has no hooks: a module sets them when it is asked to train."""

        def __deepcopy__(self, memo: Any) -> Hooked:
            return build(self.state_dict())

    def build(values: dict[str, Tensor] | None = None) -> Hooked:
        torch.manual_seed(0)
        model = Hooked(lambda _, h: torch.tanh(h)).double()
        if values is not None:
            model.load_state_dict(values)
        model.first.weight.register_hook(lambda g: g * torch.clamp(1e-2 / g.norm(), max=1.0))
        model.last.weight.register_hook(lambda g: 2 * g)
        model.last.weight.register_hook(lambda g: g.sign())
        model.last.bias.register_hook(lambda g: g - g.mean())
        return model

    frontier.trains_equally(build, (X,))
