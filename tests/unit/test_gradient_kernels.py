"""Kernels that put gradients into sums of more bits: equal to torch's own, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.core.errors import BackendWarning
from quintnet_compiler.runtime.execute import engines, gradient_kernels
from quintnet_compiler.runtime.execute.gradient_kernels import GradientKernels


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the kernels be used on CPUs, for gradients of any size; return what they are used for."""
    used: list[str] = []
    monkeypatch.setattr(gradient_kernels, "MIN_ELEMENTS", 1)
    run = GradientKernels._run

    def recorded(self: GradientKernels, name: str, slot: Tensor, gradient: Tensor) -> bool:
        done = run(self, name, slot, gradient)
        used.extend([name] * done)
        return done

    monkeypatch.setattr(GradientKernels, "_run", recorded)
    monkeypatch.setattr(gradient_kernels, "gradient_kernels", lambda engine: GradientKernels("cpu"))
    return used


def _pairs(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return sums and gradients: contiguous, in a wider buffer, transposed; with NaN, infinities and small numbers."""
    edges = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 65504.0, 1.0])
    gradient = torch.cat([edges, torch.randn(40)]).to(dtype)
    return [
        (torch.randn(6, 8), gradient.view(6, 8)),
        (torch.randn(2, 3, 12)[..., :8], gradient.view(3, 2, 8).transpose(0, 1)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_those_of_torch_to_the_bit(on_cpu: list[str], dtype: torch.dtype) -> None:
    kernels = GradientKernels("cpu")
    for slot, gradient in _pairs(dtype):
        for name, own in (("add_to_sum", Tensor.add_), ("set_sum", Tensor.copy_)):
            expected = own(slot.clone(), gradient)
            getattr(kernels, name)(slot, gradient)
            assert torch.equal(slot.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    assert on_cpu == ["add", "put"] * 2 and not kernels.warned
    assert len(kernels.kernels) == 4


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let traced operators run as they are, without compiling them."""
    monkeypatch.setattr(engines, "kernels", lambda module, fakes: lambda args: module(*args))


@pytest.mark.usefixtures("traced")
def test_gradients_of_one_size_share_a_kernel(on_cpu: list[str]) -> None:
    kernels = GradientKernels("cpu")
    for shape in ((4, 6), (24,), (2, 3, 4)):
        kernels.set_sum(torch.empty(shape), torch.ones(shape, dtype=torch.bfloat16))
    assert len(kernels.kernels) == 1 and on_cpu == ["put"] * 3


def test_torch_adds_what_no_kernel_gains(on_cpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    slot, narrow = torch.zeros(4), torch.ones(4, dtype=torch.bfloat16)
    GradientKernels("cpu").set_sum(slot, torch.ones(4))  # of one dtype
    GradientKernels("cuda").add_to_sum(slot, narrow)  # on another device
    monkeypatch.setattr(gradient_kernels, "MIN_ELEMENTS", 5)
    GradientKernels("cpu").add_to_sum(slot, narrow)
    monkeypatch.setattr(gradient_kernels, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(gradient_kernels, "MAX_KERNELS", 0)
    GradientKernels("cpu").add_to_sum(slot, narrow)
    assert slot.tolist() == [4.0] * 4 and on_cpu == []


def test_without_a_compiler_torch_runs_and_a_warning_names_the_cause(
    on_cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(engines, "kernels", fails)
    slot, kernels = torch.zeros(4), GradientKernels("cpu")
    with pytest.warns(BackendWarning, match="the sums of gradients, which runs eager: RuntimeError: no compiler"):
        kernels.set_sum(slot, torch.ones(4, dtype=torch.bfloat16))
    kernels.add_to_sum(slot, torch.ones(4, dtype=torch.bfloat16))
    assert slot.tolist() == [2.0] * 4


def test_only_engines_that_make_kernels_have_them() -> None:
    assert gradient_kernels.gradient_kernels(engines.eager) is None
    engine = engines.Inductor()
    kernels = gradient_kernels.gradient_kernels(engine)
    assert kernels is not None and kernels.warned is engine.warned


class Net(nn.Module):
    """An embedding, two linears and a bias: products that are summed in place, and gradients that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x  # type: ignore[no-any-return]


def _gradients(axes: dict[str, int], **plan: Any) -> list[Tensor]:
    torch.manual_seed(1)
    batch = torch.randint(16, (8, 4)), torch.randn(8, 4, 8)
    program = quintnet.compile(
        Net(), quintnet.Mesh(**axes), batch, loss_fn=F.mse_loss, precision="bf16", check="off",
        microbatches=2, **plan,
    )  # fmt: skip
    program.step(batch)
    return [p.grad.full_tensor() for p in program.parameters() if p.grad is not None]  # type: ignore[attr-defined]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("axes", "plan"),
    [({"dp": 2}, {}), ({"tp": 2}, {}), ({"pp": 2}, {}), ({"dp": 2, "tp": 2}, {"zero": 3})],
    ids=["dp2", "tp2", "pp2", "dp2 tp2 zero3"],
)
def test_programs_gradients_are_equal_to_the_bit(
    axes: dict[str, int], plan: dict[str, Any], on_cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels = _gradients(axes, **plan)
    assert {"put", "add"} == set(on_cpu)
    monkeypatch.setattr(gradient_kernels, "gradient_kernels", lambda engine: None)
    without = _gradients(axes, **plan)
    assert len(without) == 5 and all(map(torch.equal, with_kernels, without))
