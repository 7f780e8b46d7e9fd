"""Parts that no trace follows: refused by name, with a way out that works. And two that are followed by another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .frontier import refused, trains_equally

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
ONE = {"dp2": {"dp": 2}}
ADJACENT = torch.eye(4, dtype=torch.float64).roll(1, 0)
SPARSE = ADJACENT.to_sparse()


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.body = nn.Linear(4, 4), body
        for name, part in parts.items():
            setattr(self, name, part())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x)).square().mean()


def _doubled(x: Tensor) -> Tensor:
    return x.tanh() * 2


scripted = torch.jit.script(_doubled)
traced = torch.jit.trace(_doubled, torch.zeros(2))


@torch.jit.script
def gated(x: Tensor, factor: float = 2.0) -> Tensor:
    """As models of speech have them: shapes, a branch, and another such function."""
    rows, half = x.size(0), x.shape[1] // 2
    if factor > 1.0:
        x = scripted(x) * factor
    return (x[:, :half].tanh() * x[:, half:].sigmoid()).reshape(rows, half).repeat(1, 2)


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())


def _part(net: Any, h: Tensor) -> Tensor:
    return net.part(h)  # type: ignore[no-any-return]


@torch.library.custom_op("quintnet_test::add_one", mutates_args=())
def add_one(x: Tensor) -> Tensor:
    return x + 1


@add_one.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a scripted part": (
        lambda: Net(_part, part=lambda: torch.jit.script(Plain())),
        "QN105",
        "the part 'part' was made",
    ),
    "a traced part": (
        lambda: Net(_part, part=lambda: torch.jit.trace(Plain(), torch.zeros(2, 4))),
        "QN105",
        "the part 'part' was made by torch.jit",
    ),
    "a traced function": (lambda: Net(lambda _, h: traced(h)), "QN105", "'_doubled' was made by torch.jit.trace.*at: "),
    "a scripted part that is hidden": (
        lambda: Net(lambda net, h: net.hidden[0](h), hidden=lambda: [torch.jit.script(nn.ReLU())]),
        "QN105",
        "'forward' was made .* of a module by torch.jit.script.*at: ",
    ),
    "a sparse product": (lambda: Net(lambda _, h: torch.sparse.mm(SPARSE, h.T)), "QN101", "sparse.*to_dense"),
    "a sparse attribute": (
        lambda: Net(lambda net, h: net.near @ h.T, near=lambda: SPARSE),
        "QN101",
        "sparse.*to_dense",
    ),
    "a nested tensor": (
        lambda: Net(lambda _, h: torch.nested.as_nested_tensor([h[:3], h[3:]]).to_padded_tensor(0.0)),
        "QN101",
        "nested tensors",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_trace_follows_is_refused_by_name(name: str) -> None:
    build, code, cause = REFUSED[name]
    refused(build, (X,), code, cause=f"(?s){cause}", meshes=ONE, check="off")


WAYS_OUT: dict[str, Callable[[], nn.Module]] = {
    "the module itself": lambda: Net(_part, part=Plain),
    "the function itself": lambda: Net(lambda _, h: _doubled(h)),
    "a dense product": lambda: Net(lambda _, h: ADJACENT @ h.T),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_what_the_refusals_offer_works(name: str) -> None:
    trains_equally(WAYS_OUT[name], (X,), meshes=ONE)


def test_an_operator_that_returns_a_new_tensor_works() -> None:
    plan = {"unknown_ops": "replicate"}
    trains_equally(lambda: Net(lambda _, h: h * add_one(h.detach())), (X,), meshes={"tp2": {"tp": 2}}, plan=plan)


@pytest.mark.slow
def test_what_a_scripted_function_is_given_may_change() -> None:
    def change(net: Any, step: int) -> None:
        net.factor = step * 0.7

    def build() -> nn.Module:
        return Net(lambda net, h: gated(gated(h, net.factor)), factor=lambda: 1.5)

    for _ in range(3):
        build()(X.float())  # PyTorch compiles what is called often, with gradients of its own
    trains_equally(build, (X,), meshes=MESHES, before=change)


def _of_row(x: Tensor) -> Tensor:
    return x.detach().sum().long() % 4


FOLLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a scripted function": lambda _, h: scripted(h),
    "a scripted function as an attribute": lambda net, h: net.activation(h, net.factor),
    "one that is scripted in forward": lambda _, h: torch.jit.script(_doubled)(h),
    "fill_diagonal_": lambda _, h: (h.T @ h).fill_diagonal_(0),
    "fill_diagonal_ of a copy": lambda _, h: (h.T @ h).clone().fill_diagonal_(2.0) * 2,
    "an index without dims": lambda net, h: h * net.linear.weight[_of_row(h)],
    "of columns": lambda _, h: h[:, _of_row(h)],
    "behind an ellipsis": lambda _, h: h[..., _of_row(h)],
    "with a new dim": lambda _, h: h[None, :, _of_row(h)],
    "a negative one": lambda _, h: h[:, _of_row(h) - 4],
    "beside a number": lambda net, h: h * net.linear.weight[1, _of_row(h)],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_in_another_way(name: str) -> None:
    parts = {"activation": lambda: gated, "factor": lambda: 1.5}
    trains_equally(lambda: Net(FOLLOWED[name], **parts), (X,), meshes=MESHES)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def _similar(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z @ z.T, y)


def _masked(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")[y > 0].mean()


def _by_strides(z: Tensor, y: Tensor) -> Tensor:
    return z.clone().T.contiguous().as_strided_scatter(z[:2, :2], (2, 2), (1, 2)).square().mean()


Y = torch.arange(8) % 4


@pytest.mark.parametrize(
    ("loss", "code", "line"),
    [
        (_similar, "QN104", "z @ z.T"),
        (lambda z, y: _similar(z, y), "QN104", "z @ z.T"),
        (lambda z, y: F.cross_entropy(z.mT.mT @ z.T, y), "QN104", "z.mT.mT"),
        (_masked, "QN101", "y > 0"),
        (_by_strides, "QN105", "as_strided_scatter"),
    ],
)
def test_an_error_in_a_loss_names_its_line(loss: Callable[..., Tensor], code: str, line: str) -> None:
    options = {"microbatches": 2} if code == "QN104" else {}
    (text,) = refused(Logits, (X, Y), code, loss_fn=loss, meshes=ONE, **options).values()
    place = next(part for part in text.splitlines() if part.strip().startswith("at:"))
    assert "test_unfollowed_parts.py:" in place
    assert line in place


def test_nothing_is_offered_that_was_not_tried() -> None:
    class Failing(Logits):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError(f"of {tuple(self.linear(x).shape)[1:]}")

    (text,) = refused(Failing, (X, Y), "QN101", loss_fn=F.cross_entropy, meshes=ONE).values()
    assert "ArithmeticError" in text
    assert "fix:" not in text


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.eye(4).to_sparse(), "sparse.*\n.*to_dense"),
        (torch.eye(4).to_sparse_csr(), "sparse.*\n.*to_dense"),
        (torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]), "nested.*\n.*pad"),
        (torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged), "nested.*\n.*pad"),
    ],
    ids=["coo", "csr", "strided", "jagged"],
)
def test_batches_of_other_layouts_are_refused(x: Tensor, named: str) -> None:
    program = quintnet.compile(nn.Linear(4, 4), quintnet.Mesh(dp=2), loss_fn=lambda found, wanted: found.mean())
    with pytest.raises(quintnet.CompileError, match=f"QN102[\\s\\S]*{named}"):
        program.step((x, torch.ones(4)))
