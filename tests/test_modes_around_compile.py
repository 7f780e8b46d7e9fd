"""``quintnet.compile`` inside of modes makes what it makes outside of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import quintnet
from quintnet import Mesh
from quintnet_compiler.capture.modes import modes_left
from quintnet_compiler.driver import variants


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Swaps(TorchFunctionMode):
    """A mode that changes what a function of torch's is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.gelu(args[0]) if func is F.relu else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "gradients off": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "a mode of one's own": Counts,
    "a mode that changes functions": Swaps,
    "deterministic": deterministic,
    "anomalies": torch.autograd.detect_anomaly,
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "device": lambda: torch.device("meta"),
    "counted operations": lambda: FlopCounterMode(display=False),
    "counted collectives": CommDebugMode,
    "a tracker of modules": ModuleTracker,
}
BATCH = (torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(8) % 4)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()


def plain() -> tuple[Tensor, list[Tensor]]:
    model = build()
    loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_compile_inside_of_a_mode_is_as_outside(mode: str, check: Any) -> None:
    model = build()
    with MODES[mode]():
        program = quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=F.cross_entropy, check=check)
        on = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    with MODES[mode]():
        assert on == (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    loss, gradients = program.step(BATCH), [p.grad for p in model.parameters()]
    expected, right = plain()
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-12)
    assert len(gradients) == len(right)
    for gradient, want in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_are_on_again_afterwards() -> None:
    counts: Any = Counts  # it has no types
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), counts(), torch.autograd.detect_anomaly(False):
        with modes_left():
            assert not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled() and not torch.is_anomaly_enabled()
            assert torch.ones(1).requires_grad_().requires_grad
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu") and torch.is_anomaly_enabled()
    with torch.no_grad(), modes_left():
        assert not torch.is_grad_enabled()
    with modes_left():
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_operations_of_a_step_are_counted(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()

    model, count = linear(), FlopCounterMode(display=False)
    with count:
        F.cross_entropy(linear()(BATCH[0]), BATCH[1]).backward()  # type: ignore[no-untyped-call]
    wanted = count.get_total_flops()
    program = quintnet.compile(model, Mesh(**mesh), BATCH, loss_fn=F.cross_entropy)
    monkeypatch.setattr(variants, "capture", None)  # nothing is traced again
    for tool in (FlopCounterMode(display=False), CommDebugMode(), ModuleTracker()):
        with tool:
            loss = program.step(BATCH)
        assert torch.allclose(loss, F.cross_entropy(linear()(BATCH[0]), BATCH[1]), rtol=1e-9)
        if isinstance(tool, FlopCounterMode):
            assert tool.get_total_flops() == wanted


@pytest.mark.slow
def test_hooks_of_all_modules_that_are_the_users_are_followed() -> None:
    model = build()
    program = quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=F.cross_entropy)

    def doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return outputs * 2 if isinstance(module, nn.Linear) else None

    with register_module_forward_hook(doubled):
        with FlopCounterMode(display=False):
            loss = program.step(BATCH)
        expected, _ = plain()
    assert torch.allclose(loss, expected, rtol=1e-9)


class Positions(nn.Module):
    """Makes a tensor on the default device, and calls a function that a mode changes."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.mode = nn.Linear(8, 4).double(), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return F.relu(self.linear(x)) * torch.arange(4)


def _loss(module: nn.Module) -> float:
    return float(F.cross_entropy(module(BATCH[0]), BATCH[1]).detach())


@pytest.mark.parametrize("inside", [False, True], ids=["compiled outside", "compiled inside"])
def test_a_mode_of_functions_around_a_step_is_refused(inside: bool) -> None:
    with Swaps() if inside else contextlib.nullcontext():
        program = quintnet.compile(Positions(), Mesh(dp=2), BATCH, loss_fn=F.cross_entropy)
    for run in (program.step, program.evaluate, lambda batch: program(batch[0])):
        with Swaps(), pytest.raises(quintnet.CompileError, match=r"QN105.*\n.*Swaps, a TorchFunctionMode.*around"):
            run(BATCH)
    assert float(program.step(BATCH)) == pytest.approx(_loss(Positions()), abs=1e-12)


def test_a_mode_of_functions_in_forward_is_followed() -> None:
    program = quintnet.compile(Positions(Swaps), Mesh(dp=2), BATCH, loss_fn=F.cross_entropy)
    assert float(program.step(BATCH)) == pytest.approx(_loss(Positions(Swaps)), abs=1e-12)
    assert _loss(Positions(Swaps)) != _loss(Positions())


@pytest.mark.parametrize("batch", [BATCH, None], ids=["compiled before", "compiled in the step"])
def test_the_default_device_of_a_step_counts(batch: Any) -> None:
    model = Positions()
    with torch.device("meta") if batch is not None else contextlib.nullcontext():
        program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    expected = _loss(Positions())
    for _ in range(2):
        with torch.device("meta"):
            with pytest.raises(RuntimeError, match="device meta"):
                _loss(Positions())
            with pytest.raises(quintnet.CompileError, match=r"QN101(.|\n)*device meta(.|\n)*arange"):
                program.step(BATCH)
        with torch.device("cpu"):
            assert float(program.step(BATCH)) == pytest.approx(expected, abs=1e-12)
        assert float(program.step(BATCH)) == pytest.approx(expected, abs=1e-12)


def test_evaluation_has_the_mode_of_gradients_of_its_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (2.0 if torch.is_grad_enabled() else 1.0)

    model, batch = Net().eval(), (torch.randn(4, 4), torch.randint(4, (4,)))
    program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    for on in (True, False, True):
        with torch.set_grad_enabled(on):
            expected = model(batch[0])
            assert abs(program.evaluate(batch) - F.cross_entropy(expected, batch[1])) < 1e-6
            torch.testing.assert_close(program(batch[0]), expected)
