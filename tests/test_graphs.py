"""Segments that are captured and replayed train as the generated Python does, whatever a schedule keeps alive.

Here a replay is the captured work, done again in Python on the same memory: a result that is overwritten too soon shows
as a wrong gradient, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quintnet
from quintnet_compiler.api import compiled_program as compiled
from quintnet_compiler.runtime.execute import engines
from quintnet_compiler.runtime.execute.cuda_graphs import graphed_engine as graphs
from quintnet_compiler.runtime.execute.cuda_graphs.graph_segment import Buffers, CudaGraphSegment, Work
from quintnet_compiler.runtime.execute.cuda_graphs.graphed_engine import GraphedSegment, Graphs
from quintnet_compiler.runtime.execute.cuda_graphs.replay_safety import Observed
from quintnet_compiler.runtime.execute.engines import EngineKind, Inductor

from .models import CASES, build, reference, worst_error

pytestmark = pytest.mark.usefixtures("shared_captures")
torch.set_num_threads(1)
LIMIT = 1e-9  # float64
RATE = 0.05


@dataclass
class Again:
    """Does captured work again, on inputs that lie where they lay."""

    device: str = "cpu"
    places: set[Any] = field(default_factory=set)  # one for each result that is alive at once
    replayed: int = 0

    @property
    def captured(self) -> int:
        """How many, without those that were captured again because an input lay elsewhere, as malloc has it."""
        return len(self.places)

    def __call__(self, work: Any, given: list[Tensor]) -> Work:
        self.places.add(work.__self__)
        addresses = [x.data_ptr() for x in given]

        def replay(given: list[Tensor]) -> None:
            assert [x.data_ptr() for x in given] == addresses
            self.replayed += 1
            work(given)

        return replay


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    """What programs of ``backend="cudagraphs"`` are captured by: all segments of them. Nothing is compiled, which would
    take long."""
    found = Again()
    monkeypatch.setattr(graphs, "MIN_OPERATORS", 0)
    monkeypatch.setattr(compiled, "ENGINES", {"cudagraphs": EngineKind(lambda: Inductor(Graphs(found)))})
    monkeypatch.setattr(engines, "compile_fused", lambda module, args: None)
    return found


def _program(name: str, axes: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    options = {"loss_fn": case.loss_fn, "backend": "cudagraphs", **options}
    return quintnet.compile(build(name), quintnet.Mesh(**axes), case.batch(8), **options)


def _worst(name: str, program: quintnet.CompiledProgram, steps: int = 4) -> float:
    """The largest error of the gradients, and of the loss, of several steps of training."""
    case, model = CASES[name], build(name)
    ours = torch.optim.SGD(program.parameters(), lr=RATE)
    theirs = torch.optim.SGD(model.parameters(), lr=RATE)
    worst = 0.0
    for _ in range(steps):
        batch = case.batch(8)
        loss, expected = reference(model, batch, case.loss_fn)
        program.zero_grad()
        worst = max(worst, float(abs(program.step(batch) - loss) / loss))
        found = {n: p.grad.full_tensor() for n, p in program.named_parameters()}  # type: ignore[union-attr]
        worst = max(worst, worst_error(found, expected)[0])
        ours.step()
        theirs.step()
    return worst


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("mlp", {"pp": 2}, {"microbatches": 4}),
        ("mlp", {"pp": 2}, {"microbatches": 8, "schedule": "gpipe"}),
        ("mlp", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 1}),
        ("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
        ("vit", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
        ("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
        ("gpt", {"tp": 2, "dp": 2}, {"microbatches": 2, "zero": 3}),
        ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2, "recompute": "full"}),
        ("encoder", {"dp": 1}, {"microbatches": 2, "recompute": "selective"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error::quintnet.BackendWarning")
def test_gradients_are_those_of_the_unsplit_model(
    name: str, axes: dict[str, int], options: dict[str, Any], again: Again
) -> None:
    program = _program(name, axes, **options)
    assert _worst(name, program) < LIMIT
    known = again.captured
    assert again.replayed > known > 0
    program.zero_grad()
    program.step(CASES[name].batch(8))
    assert again.captured == known  # what is alive at once is the same at every step


@pytest.mark.slow
@pytest.mark.filterwarnings("error::quintnet.BackendWarning")
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [("mlp", {"pp": 2}, {"microbatches": 4}), ("gpt", {"tp": 2}, {"microbatches": 2, "recompute": "selective"})],
    ids=str,
)
def test_what_inductor_made_is_captured(
    name: str, axes: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Again()
    monkeypatch.setattr(compiled, "ENGINES", {"cudagraphs": EngineKind(lambda: Inductor(Graphs(found)))})
    assert _worst(name, _program(name, axes, **options)) < LIMIT
    assert found.replayed > found.captured > 0


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x) - y).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_masks_are_those_of_the_step_and_the_microbatch(recompute: str, again: Again) -> None:
    torch.manual_seed(0)
    model, batch = Forgetful().double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    programs = []
    for backend in ("cudagraphs", "eager"):
        with pytest.MonkeyPatch.context() as patch:
            if backend == "eager":
                patch.setattr(compiled, "ENGINES", engines.ENGINES)
            how: dict[str, Any] = {"microbatches": 4, "recompute": recompute, "backend": backend}
            programs.append(quintnet.compile(copy.deepcopy(model), quintnet.Mesh(pp=2), batch, **how))
            programs[-1].step(batch)
    losses = set()
    for _ in range(3):
        found = []
        for program in programs:
            program.zero_grad()
            loss = float(program.step(batch))
            found.append([loss, *(p.grad.full_tensor() for p in program.parameters())])  # type: ignore[union-attr]
        losses.add(found[0][0])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=LIMIT, atol=1e-12)
    assert again.replayed and len(losses) == 3


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"microbatches": 4}),
    ("mlp", {"microbatches": 4, "schedule": "gpipe"}),
    ("vit", {"microbatches": 4, "schedule": "zb-h1"}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "options"), SCHEDULES, ids=str)
def test_results_that_are_overwritten_in_use_are_seen(
    name: str, options: dict[str, Any], again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would have seen it."""
    monkeypatch.setattr(CudaGraphSegment, "free", property(lambda self: True))
    assert _worst(name, _program(name, {"pp": 2}, **options)) > 1e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "options"), SCHEDULES, ids=str)
def test_more_in_use_than_may_be_captured_runs_as_it_is(
    name: str, options: dict[str, Any], again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_CAPTURES", 1)
    program = _program(name, {"pp": 2}, **options)
    with pytest.warns(quintnet.BackendWarning, match="more than 1 results of it are in use") as seen:
        assert _worst(name, program) < LIMIT
    assert len([one for one in seen if issubclass(one.category, quintnet.BackendWarning)]) == 1


def test_what_cannot_be_captured_runs_as_it_is_with_one_warning(monkeypatch: pytest.MonkeyPatch, again: Again) -> None:
    def waits(self: Again, work: Work, given: list[Tensor]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Again, "__call__", waits)
    program = _program("mlp", {"tp": 2}, microbatches=2)
    with pytest.warns(quintnet.BackendWarning, match="as inductor alone runs it: .*not permitted when") as seen:
        assert _worst("mlp", program) < LIMIT
    assert len([one for one in seen if issubclass(one.category, quintnet.BackendWarning)]) == 1


def test_what_failed_in_a_capture_is_raised_and_not_that_the_capture_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending such a capture fails, too; then the allocator may ask the graph later, which has to live."""

    class Graph:
        def capture_begin(self, pool: Any, **_: Any) -> None: ...

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    for name, fake in {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "graph_pool_handle": lambda: (0, 1),
        "stream": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)

    def work(given: list[Tensor]) -> None:
        raise NotImplementedError("no kernel")

    capture = graphs.CudaGraphs()
    with pytest.raises(NotImplementedError, match="no kernel"):
        capture(work, [])
    assert [type(one) for one in capture.failed] == [Graph]


def test_without_a_gpu_it_is_inductor_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "compile_fused", lambda module, args: None)
    program = _program("mlp", {"tp": 2, "pp": 2}, microbatches=2)
    message = r"a part of the forward of stage 0 cannot be a CUDA graph, .*: its values are on the cpu, not on cuda"
    with pytest.warns(quintnet.BackendWarning, match=message) as seen:
        assert _worst("mlp", program) < LIMIT
    assert len([one for one in seen if issubclass(one.category, quintnet.BackendWarning)]) == 1


def test_outputs_stay_as_they_are(again: Again) -> None:
    model = build("vit")
    images = torch.randn(6, 4, 1, 8, 8).double()
    program = quintnet.compile(model, quintnet.Mesh(tp=2), (images[0],), training=False, backend="cudagraphs")
    with torch.no_grad():
        found = [program(x) for x in images]
        for x, mine in zip(images, found, strict=True):
            torch.testing.assert_close(mine, model(x), rtol=1e-9, atol=1e-11)
    assert again.captured


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: torch.rand_like(x).exp() + x, "draws random numbers"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).exp() + x, "draws random numbers"),
        (lambda x: x[x > 0].exp() + 1, "the host must know"),
        (lambda x: x * float(x.sum()) + 1, "the host must know"),
        (lambda x: x[0].add_(1).exp() * 2 + x, "writes into an input"),
        (lambda x: F.scaled_dot_product_attention(x, x, x).exp().add_(x), None),
        (lambda x: x.view(-1).exp(), None),
    ],
)
def test_what_a_replay_would_do_otherwise_is_told(work: Callable[[Tensor], Tensor], reason: str | None) -> None:
    with torch.no_grad(), Observed([x := torch.ones(1, 1, 4, 8)]) as seen:
        work(x)
    assert seen.operators >= 1
    assert seen.reason is None if reason is None else reason in str(seen.reason)


def test_what_cannot_be_replayed_is_never_captured(again: Again) -> None:
    def noisy(args: list[Tensor]) -> list[Tensor]:
        return [torch.rand_like(args.pop()).exp() + 1]

    place = GraphedSegment(noisy, noisy, "forward of stage 0", Graphs(again))  # type: ignore[arg-type]
    with pytest.warns(quintnet.BackendWarning, match=r"rand_like.* draws random numbers") as seen:
        found = [place([torch.ones(3)])[0] for _ in range(4)]
    assert len(seen) == 1 and not again.captured
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))


def _results(args: list[Tensor]) -> tuple[Tensor, ...]:
    """Of many kinds: new ones, two in the same memory, repeated, empty, and views of inputs."""
    x, weight = args
    args.clear()
    both = torch.stack([x * 2, x @ weight])
    return both[0], both[1:], x.sum(0, keepdim=True).expand(3, -1), weight.t(), x[1:], x[:0] + 1


KINDS = ("apart", "moved", "joint", "expanded")
CALLS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=12)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@settings(deadline=None, max_examples=300)
@given(CALLS)
def test_what_somebody_has_stays_as_it_is(calls: list[tuple[int, str, int]]) -> None:
    """Calls with one of two weights and an input, of several ``KINDS``; some results are kept for a number of calls, as
    they are or in views."""
    place = GraphedSegment(_results, _results, "forward of stage 0", Graphs(Again()))  # type: ignore[arg-type]
    weights = [torch.randn(4, 4), torch.randn(4, 4)]
    kept: list[tuple[int, Tensor, Tensor]] = []
    for number, (which, kind, last) in enumerate(calls):
        weights[which] = weights[which].add_(1) if kind in ("apart", "expanded") else weights[which].clone()
        x = torch.randn(1, 4).expand(3, 4) if kind == "expanded" else torch.randn(3, 4)
        if kind == "joint":
            x, weights[which] = torch.cat([x, weights[which]]).split([3, 4])
        args = [x, weights[which]]
        found, expected = list(place(list(args))), _results(list(args))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
        del found[3:5]  # views of inputs, which change with them
        new = [(a[..., :2] if number % 2 else a, b.clone()) for a, b in zip(found, expected[:3], strict=False)]
        kept = [one for one in [*kept, *((number + last, *pair) for pair in new)] if one[0] > number]
        del found, new
        assert all(torch.equal(mine, was[..., : mine.shape[-1]]) for _, mine, was in kept)


def test_memory_is_taken_again_as_soon_as_nobody_has_it() -> None:
    args = [torch.randn(3, 4), torch.randn(4, 4)]
    one = CudaGraphSegment(_results, args, Buffers(), Again())
    for use in (one.results, one, one):
        found = use(args)
        part = found[1][0, 1:]
        assert not one.free
        found.clear()
        assert not one.free
        del part
        assert one.free
