"""Steps that are captured whole and replayed give the bits of the same program without graphs.

Graphs are those of :mod:`.step_tape`: no Python of a step runs in a replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.api import compiled_program as compiled
from quintnet_compiler.features.whole_step_graph import engine as whole_steps
from quintnet_compiler.features.whole_step_graph.engine import WholeStepEngine
from quintnet_compiler.runtime.execute import engines
from quintnet_compiler.runtime.execute.engines import EngineKind, Inductor

from .models import CASES, build
from .step_tape import Tape

torch.set_num_threads(1)
STEPS = 20
pytestmark = pytest.mark.filterwarnings("error::quintnet.BackendWarning")


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """What programs of ``backend="graph"`` are captured by. Nothing is compiled, which would take long."""
    tape = Tape()
    table = {"graph": EngineKind(lambda: WholeStepEngine(capture=tape)), "inductor": EngineKind(Inductor)}
    monkeypatch.setattr(compiled, "ENGINES", table)
    monkeypatch.setattr(engines, "compile_fused", lambda module, args: None)
    return tape


class Everything(nn.Module):
    """Dropout, statistics of batches, buffers that forward changes, and a parameter that is used twice."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.head = nn.Linear(width, classes)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.drop(F.gelu(self.norm(self.up(x)))) + self.drop(self.up(x))
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        logits = self.head(x + self.mean)
        return logits if y is None else F.cross_entropy(logits, y)


class Noisy(nn.Module):
    """Dropout without statistics: what microbatches may be cut of."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2)) for _ in range(3)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.head(self.layers(x) + torch.rand(x.shape) * 0.1)
        return logits if y is None else F.cross_entropy(logits, y)


def _batch(rows: int, seed: int, width: int = 16, classes: int = 8) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=dice), torch.randint(classes, (rows,), generator=dice)


def _pair(build_model: Callable[[], nn.Module], batch: Any, **options: Any) -> list[quintnet.CompiledProgram]:
    """The same program with a graph and without."""
    torch.manual_seed(0)
    model = build_model()
    return [
        quintnet.compile(copy.deepcopy(model), quintnet.Mesh(dp=1), batch, backend=backend, **options)
        for backend in ("graph", "inductor")
    ]


def _same(pair: list[Any]) -> None:
    mine, other = pair
    if isinstance(mine, Tensor):
        assert torch.equal(mine.detach(), other.detach()), (mine, other)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key in mine:
            _same([mine[key], other[key]])
    else:
        assert mine == other


def _gradients(program: quintnet.CompiledProgram) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in program.named_parameters()}


def _train(
    programs: list[quintnet.CompiledProgram],
    batch_of: Callable[[int], Any],
    *,
    between: Callable[[quintnet.CompiledProgram, int], object] = lambda program, step: None,
    accumulate: int = 1,
    steps: int = STEPS,
) -> None:
    """Train both programs, and compare bits of losses, gradients, parameters and buffers after each step."""
    optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-2) for p in programs]
    for step in range(steps):
        _same([p.step(batch_of(step)) for p in programs])
        _same([_gradients(p) for p in programs])
        _same([between(p, step) for p in programs])
        if (step + 1) % accumulate == 0:
            _same([p.clip_grad_norm(1.0) for p in programs])
            for optimizer, program in zip(optimizers, programs, strict=True):
                optimizer.step()
                program.zero_grad()
        _same([p.state_dict() for p in programs])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("vit", {"microbatches": 2, "recompute": "selective"}),
        ("gpt", {"microbatches": 4, "recompute": "full"}),
        ("cnn", {"loss_chunks": 2}),
        ("hf_gpt2_double", {"microbatches": 2}),
        ("hf_llama_double", {}),
    ],
    ids=str,
)
def test_models_train_to_the_bit(name: str, options: dict[str, Any], tape: Tape) -> None:
    case = CASES[name]
    programs = _pair(lambda: build(name), case.batch(8), loss_fn=case.loss_fn, **options)
    _train(programs, lambda step: case.batch(8), steps=8)
    assert (tape.warmed, len(tape.tapes), tape.replayed) == (1, 1, 6)


@pytest.mark.slow
def test_buffers_dropout_and_evaluation_between_steps(tape: Tape) -> None:
    programs = _pair(Everything, _batch(8, 0))

    def evaluate(program: quintnet.CompiledProgram, step: int) -> Tensor:
        return program(_batch(8, 100 + step)[0])

    outputs: list[Tensor] = []
    _train(programs, lambda step: _batch(8, step), between=evaluate)
    for step in range(3):
        outputs.append(programs[0](_batch(8, step)[0]))
    for step, output in enumerate(outputs):  # which no later call overwrites
        _same([output, programs[1](_batch(8, step)[0])])
    assert len(tape.tapes) == 2
    assert tape.replayed == 2 * (STEPS - 2) + 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"precision": "bf16"}], ids=str)
def test_random_numbers_are_those_of_the_step_and_the_microbatch(options: dict[str, Any], tape: Tape) -> None:
    programs = _pair(Noisy, _batch(8, 0), microbatches=4, **options)
    losses = set()
    for _ in range(6):
        pair = [p.step(_batch(8, 0)) for p in programs]
        _same(pair)
        losses.add(float(pair[0]))
        for program in programs:
            program.zero_grad()
    assert len(losses) == 6 and tape.replayed == 4


@pytest.mark.slow
def test_each_size_of_batch_has_its_graph(tape: Tape) -> None:
    sizes = [8, 8, 8, 6, 8, 6, 6, 4, 6, 8, 4, 4]
    programs = _pair(Everything, _batch(8, 0))
    _train(programs, lambda step: _batch(sizes[step % len(sizes)], step), steps=24)
    assert len(tape.tapes) == 3
    assert tape.replayed == 24 - 3 * 2


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_accumulate_over_steps(accumulate: int, tape: Tape) -> None:
    _train(_pair(Noisy, _batch(8, 0), microbatches=2), lambda step: _batch(8, step), accumulate=accumulate)
    assert tape.replayed == STEPS - 2


def test_the_loss_scale_changes_and_steps_are_skipped(tape: Tape) -> None:
    """Batches of large numbers overflow; the scale is then halved, and the step skipped."""
    programs = _pair(Noisy, _batch(8, 0), precision="fp16", microbatches=2)

    def batch(step: int) -> Any:
        x, y = _batch(8, step)
        return (x * 300 if step in (0, 5, 6, 11) else x), y

    scales = []
    _train(programs, batch, between=lambda program, step: scales.append(program._state().scaler.scale))
    assert scales[::2] == scales[1::2] and len(set(scales)) > 1
    assert len(tape.tapes) == 1 and tape.replayed == STEPS - 2


def test_gradients_are_the_same_tensors_in_every_step(tape: Tape) -> None:
    program, _ = _pair(Noisy, _batch(8, 0))
    seen = set()
    for step in range(6):
        program.step(_batch(8, step))
        gradients = [p.grad for p in program.parameters()]
        seen.add(tuple((id(x), x.data_ptr()) for x in gradients if x is not None))
        del gradients
        program.zero_grad()
    assert len(seen) == 1


def test_a_gradient_that_somebody_keeps_stays_as_it_is(tape: Tape) -> None:
    programs = _pair(Noisy, _batch(8, 0))
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(program: quintnet.CompiledProgram, step: int) -> None:
        if step in (4, 9):
            gradient = next(program.parameters()).grad
            assert gradient is not None
            kept.append((gradient, gradient.clone()))

    for step in range(12):
        _same([p.step(_batch(8, step)) for p in programs])
        for program in programs:
            keep(program, step)
            program.zero_grad()
    for gradient, was in kept:
        assert torch.equal(gradient, was)


def test_parameters_that_are_replaced_are_read_where_they_are(tape: Tape) -> None:
    programs = _pair(Noisy, _batch(8, 0))
    models = [p._task.model for p in programs]

    def change(program: quintnet.CompiledProgram, step: int) -> None:
        head = models[programs.index(program)].head
        if step == 5:
            head.weight.data = head.weight.data * 0.5
        if step == 9:
            head.weight = nn.Parameter(head.weight.detach() * 2)
        if step == 13:
            with torch.no_grad():
                head.weight.mul_(0.5)

    for step in range(STEPS):
        _same([p.step(_batch(8, step)) for p in programs])
        _same([_gradients(p) for p in programs])
        for program in programs:
            change(program, step)
            program.zero_grad()
    assert len(tape.tapes) == 3


def test_checkpoints_are_loaded_into_what_graphs_read(tape: Tape, tmp_path: Path) -> None:
    programs = _pair(Noisy, _batch(8, 0))

    def save_or_load(program: quintnet.CompiledProgram, step: int) -> None:
        folder = tmp_path / str(programs.index(program))
        if step == 5:
            program.save(folder, step=step)
        if step == 9:
            program.load(folder)

    _train(programs, lambda step: _batch(8, step), between=save_or_load)
    assert tape.replayed == STEPS - 2


def test_a_step_that_is_not_finite_raises_after_the_replay(tape: Tape) -> None:
    programs = _pair(Noisy, _batch(8, 0))
    for step in range(6):
        x, y = _batch(8, step)
        for program in programs:
            program.zero_grad()
            if step == 4:
                with pytest.raises(quintnet.RunError, match=r"QN501(?s:.*)batch"):
                    program.step((x / 0, y))
            else:
                program.step((x, y))
        _same([_gradients(p) for p in programs])


def test_without_a_check_nothing_is_read(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = _pair(Noisy, _batch(8, 0), check_finite=False)
    _train(programs, lambda step: _batch(8, step), steps=5)
    monkeypatch.setattr(Tensor, "tolist", lambda self: pytest.fail("the host waits"))
    programs[0].step(_batch(8, 0))


# -- refusals


def _warns(program: quintnet.CompiledProgram, batch: Any, text: str, steps: int = 4) -> None:
    with pytest.warns(quintnet.BackendWarning, match=text) as seen:
        for _ in range(steps):
            program.step(batch)
    assert len([one for one in seen if issubclass(one.category, quintnet.BackendWarning)]) == 1


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        ({"dp": 2}, {}, r"has 2 ranks, and collectives in a graph are not implemented yet"),
        ({"pp": 2}, {"microbatches": 2}, r"collectives in a graph are not implemented yet"),
        ({}, {"offload": ("optimizer", "parameters")}, r"offloaded"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_runs_in_segments(
    axes: dict[str, int], options: dict[str, Any], text: str, tape: Tape
) -> None:
    torch.manual_seed(0)
    model, batch = Noisy(), _batch(8, 0)
    program = quintnet.compile(model, quintnet.Mesh(**axes), batch, backend="graph", **options)
    _warns(program, batch, rf"a step cannot be one CUDA graph, and runs in segments.*: .*({text})")
    assert not tape.tapes


def test_on_a_cpu_steps_run_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "compile_fused", lambda module, args: None)
    program = quintnet.compile(Noisy(), quintnet.Mesh(), _batch(8, 0), backend="graph")
    _warns(program, _batch(8, 0), "its values are on the cpu, not on cuda")


def test_what_a_device_refuses_runs_in_segments(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = _pair(Noisy, _batch(8, 0))

    def refuse(self: Tape, work: Callable[[], object]) -> Callable[[], None]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Tape, "capture_step", refuse)
    for step in range(2):
        _same([p.step(_batch(8, step)) for p in programs])
        [p.zero_grad() for p in programs]
    with pytest.warns(quintnet.BackendWarning, match="RuntimeError: operation not permitted"):
        _same([p.step(_batch(8, 2)) for p in programs])
    _same([_gradients(p) for p in programs])
    [p.zero_grad() for p in programs]
    _train(programs, lambda step: _batch(8, step), steps=4)


def test_more_sizes_than_may_have_graphs_run_in_segments(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_steps, "MAX_SIZES", 0)
    program, _ = _pair(Noisy, _batch(8, 0))
    _warns(program, _batch(8, 0), "more than 0 sizes of batches have a graph already")
