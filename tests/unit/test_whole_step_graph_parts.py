"""Parts of whole steps as graphs: what cannot be captured, keys and numbers on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.core.precision import times
from quintnet_compiler.core.rng import DISTRIBUTIONS, Key, KeyOnDevice, keep_mask
from quintnet_compiler.features.whole_step_graph.captured_step import CapturedStep, CaptureError
from quintnet_compiler.features.whole_step_graph.cuda_capture import CudaStepCapture
from quintnet_compiler.features.whole_step_graph.engine import WholeStepEngine
from quintnet_compiler.features.whole_step_graph.feature import WHOLE_STEP_GRAPH
from quintnet_compiler.features.whole_step_graph.obstacles import obstacle
from quintnet_compiler.features.whole_step_graph.step_values import DrawnKeys, StepValues
from quintnet_compiler.runtime.execute.engines import ENGINES, add_engines, eager
from quintnet_compiler.runtime.execute.executor import Run
from quintnet_compiler.runtime.execute.whole_steps import EngineOfSteps

from ..models import CASES, build

T = TypeVar("T")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("key", [Key(0, 0, 0), Key(3, 17, 5), Key(2**40, 2**33, 99)], ids=str)
def test_keys_on_the_device_give_the_same_numbers(key: Key) -> None:
    there = KeyOnDevice(torch.tensor([key.hash(0), key.hash(1)]))
    positions, sizes = [torch.arange(5), torch.arange(3, 10)], (5, 16)
    assert torch.equal(keep_mask(positions, sizes, 0.3, key), keep_mask(positions, sizes, 0.3, there))
    for draw in DISTRIBUTIONS.values():
        assert torch.equal(draw(positions, sizes, key, torch.float32), draw(positions, sizes, there, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [65536.0, 2.0**-17, 0.3, 3e38])
def test_numbers_on_the_device_multiply_as_those_of_the_host(dtype: torch.dtype, factor: float) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = torch.tensor(factor, dtype=torch.float64)
    assert torch.equal(times(x, there), x * factor)
    assert torch.equal(times(x, 1 / there), x * (1 / factor))
    assert times(x[0], there).dtype is dtype


def test_values_of_a_step_are_written_where_the_graph_reads_them() -> None:
    keys = DrawnKeys(first=6)
    assert keys(1, 7, 4) == Key(1, 7, 4)
    keys(1, 6, 2)
    values = StepValues(keys, torch.device("cpu"), scaled=True)
    values.set(Run(seed=1, step=3, scale=8.0), first=6)
    row, scale = values.drawn_key(1, 7, 4), values.scale
    assert scale is not None
    for first in (6, 10):
        values.set(Run(seed=1, step=first // 2, scale=float(first)), first)
        key = Key(1, first + 1, 4)
        assert row.hashes.tolist() == [key.hash(0), key.hash(1)]
        assert float(scale) == first
    with pytest.raises(KeyError):
        values.drawn_key(1, 12, 4)


# -- captures


@dataclass
class Doubles:
    """An executor whose steps double a parameter and add the batch."""

    batches: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    program: Any = field(default_factory=lambda: SimpleNamespace(last=slice(1, None)))

    def compute(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor], options: Run) -> tuple[list[Tensor], None]:
        return [state["weight"] * 2 + inputs[0]], None

    def conclude(self, options: Run, verdict: Tensor | None) -> None: ...


@dataclass
class Repeats:
    """Captures work as itself, which is done again on what it was given."""

    device_kind: str = "cpu"
    captures: int = 0
    refuses: bool = False

    def warm_up(self, work: Callable[[], T]) -> T:
        return work()

    def capture_step(self, work: Callable[[], object]) -> Callable[[], None]:
        self.captures += 1
        if self.refuses:
            raise RuntimeError("not permitted\nwhen a stream is capturing")

        def replay() -> None:
            work()

        return replay


def test_state_that_moves_is_copied_and_the_step_captured_again_once() -> None:
    capture, x = Repeats(), torch.ones(3)
    step = CapturedStep(Doubles(), capture, [x], DrawnKeys(0), Run())  # type: ignore[arg-type]
    weights = [torch.full((3,), float(number)) for number in range(6)]
    counts = []
    for weight in (weights[0], weights[0], weights[0], weights[1], weights[2], weights[3]):
        [result] = step({"weight": weight}, [x], Run())
        assert torch.equal(result, weight * 2 + 1)
        counts.append(capture.captures)
        x.add_(1).sub_(1)
    assert counts == [0, 1, 1, 2, 2, 2]


def test_a_step_that_a_device_refuses_to_capture_says_why_in_a_line() -> None:
    step = CapturedStep(Doubles(), Repeats(refuses=True), [torch.ones(3)], DrawnKeys(0), Run())  # type: ignore[arg-type]
    state = {"weight": torch.ones(3)}
    step(state, [torch.ones(3)], Run())
    with pytest.raises(CaptureError, match=r"^RuntimeError: not permitted$"):
        step(state, [torch.ones(3)], Run())


# -- what cannot be one graph, in programs for a GPU, which need none to be compiled


def _obstacle(model: nn.Module, batch: Any, axes: dict[str, int] | None = None, **options: Any) -> str | None:
    mesh = quintnet.Mesh(**(axes or {}))
    program = quintnet.compile(model, mesh, batch, device="cuda", **options)._primary().program
    return obstacle(program, program.rank(0), CUDA, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_models_are_captured(name: str) -> None:
    case = CASES[name]
    assert _obstacle(build(name), case.batch(8), loss_fn=case.loss_fn) is None


def test_experts_whose_rows_the_host_counts_are_not() -> None:
    reason = _obstacle(build("mixture"), CASES["mixture"].batch(8))
    assert reason is not None and "the host waits for the result of quintnet.group_plan" in reason


def test_collectives_are_not() -> None:
    reason = _obstacle(build("mlp"), CASES["mlp"].batch(8), {"tp": 2}, loss_fn=F.cross_entropy)
    assert reason is not None and "2 ranks, and collectives in a graph are not implemented yet" in reason


@pytest.mark.slow
def test_offloaded_values_are_not() -> None:
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "microbatches": 2, "offload": ("activations",)}
    reason = _obstacle(build("gpt"), CASES["gpt"].batch(8), **options | {"loss_fn": None})
    assert reason is not None and "copies values to the host or to a disk" in reason
    options |= {"offload": ("optimizer", "parameters")}
    reason = _obstacle(build("mlp"), CASES["mlp"].batch(8), **options)
    assert reason is not None and "offloaded" in reason


def test_other_devices_are_not() -> None:
    program = quintnet.compile(build("mlp"), quintnet.Mesh(), CASES["mlp"].batch(8), loss_fn=F.cross_entropy)
    reason = obstacle(program._primary().program, program._primary().program.rank(0), torch.device("cpu"), "cuda")
    assert reason == "its values are on the cpu, not on cuda"


# -- the engine


def test_the_engine_is_one_of_steps_that_no_other_feature_has() -> None:
    engine = ENGINES["graph"].make()
    assert isinstance(engine, WholeStepEngine) and isinstance(engine, EngineOfSteps)
    assert isinstance(engine.capture, CudaStepCapture) and engine.capture.device_kind == "cuda"
    assert not isinstance(eager, EngineOfSteps) and not isinstance(ENGINES["inductor"].make(), EngineOfSteps)
    assert [name for name, kind in ENGINES.items() if kind.replayed] == ["cudagraphs"]
    with pytest.raises(ValueError, match="an engine graph already"):
        add_engines(WHOLE_STEP_GRAPH.engines)


def test_a_reason_is_told_once() -> None:
    engine = ENGINES["graph"].make()
    assert isinstance(engine, WholeStepEngine)
    with pytest.warns(quintnet.BackendWarning, match="one CUDA graph, .* as with inductor: some reason") as seen:
        engine.tell_once("some reason")
        engine.tell_once("some reason")
    assert len(seen) == 1
