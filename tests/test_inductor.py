"""Programs whose computation inductor has compiled train as the generated Python does."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import quintnet
from quintnet_compiler.core.annotations import memory_of, num_bytes, values
from quintnet_compiler.ir.distributed_program import StageProgram
from quintnet_compiler.runtime.execute import engines
from quintnet_compiler.runtime.execute.engines import CompiledSegment, Inductor
from quintnet_compiler.runtime.execute.segments import MAX_VARIANTS, Segment, Stepper, split

from .models import CASES, build, reference, worst_error

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
# float64: kernels that inductor fuses add up in another order and keep what eager rounds, as any other layout does
LIMIT = 1e-9
BACKENDS = ("eager", "inductor")


def _program(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(build(name), quintnet.Mesh(**axes), case.batch(8), loss_fn=case.loss_fn, **options)


def _inductor(program: quintnet.CompiledProgram) -> Inductor:
    found = program._state().engine  # type: ignore[attr-defined]
    assert isinstance(found, Inductor)
    return found


def _compiled(kernel: CompiledSegment) -> int:
    """How many variants run as code of inductor's."""
    return sum(function is not kernel.module for function in kernel.variants)


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("mlp", {"tp": 2}, {"microbatches": 2}),
        pytest.param("gpt", {"pp": 2, "dp": 2}, {"microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("hf_llama_double", {"tp": 2}, {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("mixture", {"ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param("gpt", {"tp": 2}, {"async_tp": True}, marks=pytest.mark.slow),
        pytest.param("mlp", {"dp": 2}, {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("vit", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_unsplit_model(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    case, model = CASES[name], build(name)
    program = _program(name, axes, backend="inductor", **options)
    twin = _program(name, axes, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", quintnet.BackendWarning)
        for step in range(2):
            batch = case.batch(8)
            loss, expected = reference(model, batch, case.loss_fn)
            program.zero_grad()
            assert abs(program.step(batch) - loss) / loss < LIMIT
            found = {n: p.grad.full_tensor() for n, p in program.named_parameters()}  # type: ignore[union-attr]
            assert worst_error(found, expected)[0] < LIMIT
            if not step:
                kernels = {id(k): len(k.variants) for k in _inductor(program).kernels.values()}
                assert sum(map(_compiled, _inductor(program).kernels.values())) > 0
    # the second step compiles nothing
    assert kernels == {id(k): len(k.variants) for k in _inductor(program).kernels.values()}
    # what is sent does not depend on what runs it, and of what is saved, only whether fused values are made again
    ours, theirs = (made._primary().program for made in (program, twin))
    assert ours.transfers == theirs.transfers and ours.schedule == theirs.schedule
    assert all(len(a.saved) <= len(b.saved) for a, b in zip(ours.stages, theirs.stages, strict=True))


def _segments(module: fx.GraphModule) -> list[Segment]:
    return [part for part in split(module.graph) if isinstance(part, Segment)]


@pytest.mark.slow
def test_equal_segments_of_blocks_and_ranks_are_one() -> None:
    program = _program("gpt", {"tp": 2})
    stage = program.ranks[0].stages[0]
    for piece, most in ((stage.forward, 8), (stage.backward, 24)):
        parts = _segments(piece.module)
        kinds = {part.module.code for part in parts}
        assert len(kinds) <= most < len(parts) + most / 3, (len(kinds), len(parts))  # three blocks are written once


def _saved_bytes(stage: StageProgram) -> int:
    made = {memory_of(node) for node in stage.forward.module.graph.nodes if node.name in stage.saved}
    return sum(num_bytes(x) for node in made for x in values(node))


@pytest.mark.slow
def test_a_backward_without_collectives_is_one_segment_and_saves_less() -> None:
    name = "hf_llama_double"
    stages = {b: _program(name, {"dp": 1}, backend=b)._primary().program.stages[0] for b in BACKENDS}
    parts = split(stages["inductor"].backward.module.graph)
    assert len(parts) == 1 and isinstance(parts[0], Segment)
    assert sorted(parts[0].settles) == sorted(stages["inductor"].gradients)
    saved = {backend: _saved_bytes(stage) for backend, stage in stages.items()}
    assert saved["inductor"] < 0.9 * saved["eager"], saved
    # where the plan says what is made again, backends save the same
    given = [_program(name, {"dp": 1}, backend=backend, recompute="selective") for backend in BACKENDS]
    assert len({program._primary().program.digest for program in given}) == 1


class _Comm:
    """Counts what is alive when a gradient is handed over."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def all_reduce(self, x: Tensor, axis: str, at: int) -> Tensor:
        return x + 1

    def accumulate(self, x: Tensor, name: str) -> None:
        self.kept.append(x)

    def swap(self, xs: list[Tensor], at: int) -> tuple[Tensor, Tensor]:
        return xs[1], xs[0]


@pytest.mark.parametrize("pure", [False, True])
def test_a_function_in_steps_is_the_function_and_lets_go_of_its_arguments(pure: bool) -> None:
    graph = fx.Graph()
    comm, a, b = (graph.placeholder(name) for name in ("comm", "a", "b"))
    first = graph.call_function(torch.mul, (a, b))
    graph.call_method("accumulate", (comm, first, "a"))
    second = graph.call_function(torch.exp, (first,))
    third = graph.call_method("all_reduce", (comm, second, "tp", 0))
    swapped = graph.call_method("swap", (comm, [third, b], 1))
    ours, theirs = (graph.call_function(operator.getitem, (swapped, i)) for i in range(2))
    last = graph.call_function(torch.sub, (theirs, ours))
    graph.output((last, a))
    parts = split(graph, pure=pure)
    # a gradient is handed over within its segment, or waits for the end of one that only computes
    kinds = [part.settles if isinstance(part, Segment) else part.target for part in parts]
    assert kinds[:3] == ([(), "accumulate", "all_reduce"] if pure else [("a",), "all_reduce", "swap"])
    alive: list[int] = []

    def run(segment: Segment) -> Any:
        plain = fx.GraphModule({}, segment.module.graph)

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            alive.append(len(given))
            return plain(*given)

        return call

    x, y, notes = torch.randn(2), torch.randn(2), _Comm()
    args = [notes, x, y]
    found = Stepper.from_parts(graph, parts, run)(args)
    assert not args and alive == [2 if pure else 3, 2]
    torch.testing.assert_close(found[0], (x * y).exp() + 1 - y)
    assert found[1] is x and torch.equal(notes.kept[0], x * y)


def test_what_cannot_be_compiled_runs_eager_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(engines, "compile_fused", broken)
    case = CASES["mlp"]
    program = _program("mlp", {"tp": 2, "pp": 2}, backend="inductor")
    with pytest.warns(quintnet.BackendWarning, match=r"of stage 0, which runs eager: .*No working C\+\+") as seen:
        loss = program.step(case.batch(8))
    assert len([one for one in seen if issubclass(one.category, quintnet.BackendWarning)]) == 1
    expected, _ = reference(build("mlp"), case.batch(8), case.loss_fn)
    assert abs(loss - expected) / expected < LIMIT


def test_sizes_that_never_stay_the_same_are_not_compiled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.exp, (graph.placeholder("x"),)),))
    module = fx.GraphModule({}, graph)
    kernel = CompiledSegment(module, "forward of stage 0", set())
    monkeypatch.setattr(CompiledSegment, "_compiled", lambda self, args: lambda given: (given.pop().exp(),))
    monkeypatch.setattr(engines, "eager", lambda module, name: lambda given: (given.pop().exp() + 1,))
    for rows in range(MAX_VARIANTS):
        assert torch.equal(kernel([torch.zeros(rows)])[0], torch.ones(rows))
    with pytest.warns(quintnet.BackendWarning, match="more than 8 sizes"):
        assert torch.equal(kernel([torch.zeros(20)])[0], 2 * torch.ones(20))
    assert torch.equal(kernel([torch.zeros(3)])[0], torch.ones(3))  # those that it knows stay compiled


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(quintnet.CompileError, match="QN108"):
        _program("mlp", {"tp": 2}, backend="inducter")


def _train(backend: str) -> tuple[float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    program = _program("mlp", {"dp": 2}, backend=backend)
    loss = float(program.step(CASES["mlp"].batch(8)))
    return loss, {n: p.grad.full_tensor() for n, p in program.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.slow
def test_each_process_compiles_for_itself() -> None:
    expected, gradients = _train("eager")
    for loss, found in quintnet.launch(_train, 2, ("inductor",), timeout=240):
        assert loss == pytest.approx(expected, rel=LIMIT)
        assert worst_error(found, gradients)[0] < LIMIT
