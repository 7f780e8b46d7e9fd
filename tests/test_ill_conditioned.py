"""The comparison with the module where 32 bits say nothing: ReLUs at 0, BatchNorm over two numbers.

A right program passes, whatever its rounding; a wrong one is refused, however small its fault.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet_compiler.capture.capture as tracing
from quintnet import CheckWarning, CompileError, Mesh, compile
from quintnet_compiler.equivalence import exact_step
from quintnet_compiler.equivalence.exact_step import Float64, exact_differences, wrong_operators
from quintnet_compiler.equivalence.module_check import ModuleCheck
from quintnet_compiler.equivalence.module_sides import Sides
from quintnet_compiler.equivalence.module_step import Owner
from quintnet_compiler.equivalence.unsplit_step import UnsplitStep
from quintnet_compiler.equivalence.verify import Comparison
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.autodiff.vector_jacobian import _BY_HAND, VectorJacobian

from .resnets import images, resnet

aten = torch.ops.aten


class Kinks(nn.Module):
    """Many ReLUs at 0 up to rounding, between BatchNorms over two numbers; ``dtype``: what forward computes in."""

    def __init__(self, fault: float = 1.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(4))
        self.head = nn.Linear(32, 4)
        self.fault, self.dtype = fault, dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.dtype is None else x.to(self.dtype)
        h = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + norm(layer(h)).relu() * torch.full((), 1.0)
        return self.head(h * self.fault)  # type: ignore[no-any-return]


BATCH = (torch.randn(2, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1]))


def check_of(model: nn.Module, batch: Any = BATCH, traced: nn.Module | None = None) -> ModuleCheck:
    """What ``traced`` (by default the module) becomes, beside the module."""
    captured = tracing.capture(traced or model, batch, F.cross_entropy)
    tensors = {name: dict(model.state_dict(keep_vars=True)).get(name, x) for name, x in captured.tensors.items()}
    return ModuleCheck(
        Owner(model, F.cross_entropy, tensors, "loss", training=True), captured, batch, RULES, 0, torch.device("cpu")
    )


def sides_of(model: nn.Module, batch: Any = BATCH) -> Sides:
    sides = check_of(model, batch)._sides()
    assert isinstance(sides, Sides)
    return sides


@pytest.fixture
def every_difference_counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """32 bits always seem to differ, so that float64 decides each time. What was asked is listed."""
    asked: list[str] = []
    right = Sides.compare

    def compare(self: Sides) -> Any:
        found = right(self)
        asked.append(str(self.dtype))
        if self.dtype is torch.float64 or found:
            return found
        return [Comparison("gradient", "head.weight", 0, 1.0, self.limit)]

    monkeypatch.setattr(Sides, "compare", compare)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("layers", [18, pytest.param(50, marks=pytest.mark.slow)])
def test_resnets_pass_where_float32_is_ill_conditioned(layers: int) -> None:
    torch.manual_seed(0)
    model, batch = resnet(layers, width=8, classes=10), images(32, classes=10)
    assert check_of(model, batch).difference() is None


SIZES = [(18, 32), (18, 64), (18, 224), (50, 32), (50, 64), (50, 224)]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layers", "size", "seed"),
    [(*sizes, seed) for i, sizes in enumerate(SIZES) for seed in range(5 * (i % 2), 5 * (i % 2) + 5)],
)
def test_every_resnet_compiles(layers: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = resnet(layers), images(size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckWarning)
        compile(model, Mesh(dp=2), batch, loss_fn=F.cross_entropy)


def _scaled(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Linear layers' derivatives that are wrong by a factor."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        right = _BY_HAND[aten.linear.default]

        def wrong(self: VectorJacobian, *args: Any, **kwargs: Any) -> Any:
            made, pullback = right(self, *args, **kwargs)

            def scaled(tangents: Any) -> Any:
                return pullback([self.builder.call(aten.mul.Scalar, tangents[0], factor)])

            return made, scaled

        monkeypatch.setitem(_BY_HAND, aten.linear.default, wrong)

    return patch


@functools.cache
def traced(name: str) -> ModuleCheck:
    torch.manual_seed(0)
    if name == "kinks":
        return check_of(Kinks())
    return check_of(resnet(18, width=8, classes=10), images(32, classes=10))


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [1 + 3e-4, 1 - 1e-3, 0.0])
@pytest.mark.parametrize("name", ["kinks", pytest.param("resnet", marks=pytest.mark.slow)])
def test_a_derivative_that_is_wrong_by_little_is_refused(
    name: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scaled(factor)(monkeypatch)
    found = traced(name).difference()
    assert found is not None and found.code == "QN111" and "gradient" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("fault", [1 + 3e-4, 1 - 1e-3])
def test_a_value_that_is_wrong_by_little_is_refused(fault: float) -> None:
    right, wrong = Kinks(), Kinks(fault)
    found = check_of(right, traced=wrong).difference()
    assert found is not None and found.code == "QN111"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float64_runs_the_very_graph(dtype: torch.dtype, every_difference_counts: list[str]) -> None:
    model = Kinks(dtype=dtype).to(dtype)
    assert check_of(model, (BATCH[0].to(dtype), BATCH[1])).difference() is None
    assert every_difference_counts == [str(dtype), "torch.float64"]


def test_a_program_that_rounds_where_the_module_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Kinks()
    right = UnsplitStep.value

    def careless(self: UnsplitStep, node: Any, *args: Any) -> Any:
        made = right(self, node, *args)
        return made.to(torch.float16).to(made.dtype) if node.target is aten.linear.default else made

    monkeypatch.setattr(UnsplitStep, "value", careless)
    found = check_of(model).difference()
    assert found is not None and found.code == "QN111"


@pytest.mark.slow
def test_an_operator_that_is_wrong_in_float32_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = sides_of(Kinks())
    assert wrong_operators(sides) == []
    right = UnsplitStep.value

    def careless(self: UnsplitStep, node: Any, *args: Any) -> Any:
        made = right(self, node, *args)
        wrong = node.target is aten.linear.default and made.dtype is torch.float32
        return made * 1.001 if wrong else made

    monkeypatch.setattr(UnsplitStep, "value", careless)
    assert exact_differences(sides) == []
    assert {node.target for node in wrong_operators(sides)} == {aten.linear.default}
    found = check_of(Kinks()).difference()
    assert found is not None and found.code == "QN111"


def test_a_sum_that_is_nothing_but_rounding_is_no_wrong_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    sides = sides_of(model, (torch.randn(8, 32), torch.arange(8) % 4))
    gradient = sides.theirs.gradients["0.bias"]
    assert gradient is not None and float(gradient.abs().max()) < 1e-6
    assert wrong_operators(sides) == []


@pytest.mark.slow
def test_a_dtype_of_the_program_alone_gets_no_slack() -> None:
    class Narrow(Kinks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16().float() if self.fault == 2 else x)

    right, wrong = Narrow(1.0), Narrow(1.0)
    wrong.fault = 2.0
    wrong.head.weight = nn.Parameter(right.head.weight.detach() / 2)  # what is traced is right but for its rounding
    check = check_of(right, traced=wrong)
    sides = check._sides()
    assert isinstance(sides, Sides) and sides.dtype is torch.float32
    assert check.difference() is not None


def test_code_that_names_a_dtype_computes_in_float64() -> None:
    one = torch.ones(3, dtype=torch.float64)
    with Float64(frozenset({torch.float32})):
        assert one.float().dtype is torch.float64
        assert one.sum(dtype=torch.float32).dtype is torch.float64
        assert torch.linspace(0, 1, 5).dtype is torch.float64
        assert torch.full((2,), 0.5).dtype is torch.float64
        assert torch.arange(3).dtype is torch.int64
        assert torch.full((2,), 3).dtype is torch.int64
        assert one.bfloat16().dtype is torch.bfloat16
        assert torch.zeros(2, dtype=torch.int32).dtype is torch.int32
    assert torch.zeros(2).dtype is torch.float32
    assert exact_step.DOUBLED.isdisjoint({torch.float64})


def test_an_error_in_float32_alone_is_an_error(every_difference_counts: list[str]) -> None:
    """Where float64 cannot run, what another rounding does to the module decides, as before."""

    class Only32(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype is not torch.float32:
                raise TypeError("float32 alone")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return Only32.apply(super().forward(x))  # type: ignore[no-untyped-call, no-any-return]

    torch.manual_seed(0)
    with pytest.raises(CompileError, match="QN111"):
        compile(Net(nn.Linear(32, 4)), Mesh(dp=2), BATCH, loss_fn=F.cross_entropy)
    assert every_difference_counts == ["torch.float32"]
