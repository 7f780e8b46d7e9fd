"""Every schedule, with several stages per rank and with backwards in two halves, trains as the unsplit model does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.schedules.check import verify_schedule
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import Op

from .models import CASES, build, reference, worst_error
from .test_dropout import Dropped

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
ROWS = 8
PIPELINES = [("gpipe", 2), ("gpipe", 3), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
PIPELINES += [("zb-v", 2), ("dualpipe-v", 2)]


def _compile(name: str, mesh: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    case = CASES[name]
    return quintnet.compile(build(name), quintnet.Mesh(**mesh), case.batch(ROWS), loss_fn=case.loss_fn, **options)


def _trains_equally(name: str, mesh: dict[str, int], **options: Any) -> quintnet.CompiledProgram:
    """Two steps of AdamW: loss, every gradient, every parameter."""
    case, twin = CASES[name], build(name)
    batch = case.batch(ROWS)
    program = _compile(name, mesh, **options)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (program, twin))
    for _ in range(2):
        loss = program.step(batch)
        found = {n: p.grad.full_tensor() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
        expected_loss, expected = reference(twin, batch, case.loss_fn)
        assert abs(float(loss - expected_loss)) / abs(float(expected_loss)) < 1e-9
        error, worst = worst_error(found, expected)
        assert error < case.tolerance, worst
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    weights = {n: p.full_tensor() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
    # AdamW divides by small numbers
    assert worst_error(weights, dict(twin.named_parameters()))[0] < 100 * case.tolerance
    return program


FAST: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    # embedding and head are tied: stages of one rank, and of two
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}),
    ("gpt", {"pp": 3}, {"microbatches": 4, "schedule": "zb-h1"}),
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    ("mlp", {"pp": 1}, {"microbatches": 2, "schedule": "zb-v", "virtual_stages": 2}),
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "dualpipe-v", "virtual_stages": 2}),
    ("mlp", {"pp": 2, "dp": 2}, {"microbatches": 1, "schedule": "dualpipe-v", "virtual_stages": 2, "zero": 2}),
    ("mlp", {"pp": 2}, {"microbatches": 8, "schedule": "gpipe", "virtual_stages": 3}),
    # values that skip stages
    ("cnn", {"pp": 3}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2}),
    ("cnn", {"pp": 3}, {"microbatches": 8, "schedule": "zb-v", "virtual_stages": 2}),
    # one row on each rank: what the next stage sends back is the gradient of the positions, as it came
    ("vit", {"pp": 3, "dp": 2}, {"microbatches": 4, "schedule": "gpipe", "virtual_stages": 3}),
    ("vit", {"pp": 3, "dp": 2}, {"microbatches": 4, "schedule": "zb-h1", "plan": {"stages": ["blocks.0", "norm"]}}),
    # beside other axes
    ("gpt", {"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2, "schedule": "zb-v", "virtual_stages": 2}),
    ("mlp", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    ("gpt", {"pp": 2, "cp": 2}, {"microbatches": 4, "schedule": "zb-h1", "context": "ring"}),
    ("mixture", {"pp": 2, "ep": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    # values that are computed again
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb-h1", "recompute": "full"}),
    ("mlp", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 2, "recompute": "full"}),
    # made for the model's own stages
    ("cnn", {"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "synthesized", "virtual_stages": 2}),
    # uneven stages, one of them a single operator
    (
        "mlp",
        {"pp": 2},
        {"microbatches": 4, "plan": {"schedule": "zb-v", "virtual_stages": 2, "stages": ["ups.0", "ups.1", "head"]}},
    ),
]

MORE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("encoder", {"pp": 2, "dp": 2}, {"microbatches": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ("hf_llama_double", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    ("cnn", {"pp": 4}, {"microbatches": 2, "schedule": "zb-h1"}),
    ("gpt", {"pp": 3}, {"microbatches": 4, "schedule": "synthesized"}),
    ("gpt", {"pp": 2, "cp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2, "context": "ulysses"}),
    ("mixture", {"pp": 2, "dp": 2}, {"microbatches": 2, "schedule": "zb-v", "virtual_stages": 2, "experts": ("dp",)}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "mesh", "options"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)], ids=str
)
def test_a_pipeline_trains_as_the_unsplit_model(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    _trains_equally(name, mesh, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "virtual_stages"), [("interleaved", 2), ("synthesized", 2)])
def test_evaluation_follows_and_the_plan_says_all(schedule: str, virtual_stages: int) -> None:
    case, model, mesh = CASES["cnn"], build("cnn"), {"pp": 2}
    program = _compile("cnn", mesh, microbatches=4, schedule=schedule, virtual_stages=virtual_stages)
    assert len(program.plan.stages) == 3 and program.plan.virtual_stages == 2
    again = _compile("cnn", mesh, plan=program.plan)
    assert again._primary().program.digest == program._primary().program.digest
    larger, (loss, expected) = case.batch(2 * ROWS), reference(model, case.batch(2 * ROWS), case.loss_fn)
    torch.testing.assert_close(program.step(larger), loss)
    found = {n: p.grad.full_tensor() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    assert worst_error(found, expected)[0] < case.tolerance
    images, labels = case.batch(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(program(images), model(images), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(program.evaluate((images, labels)), reference(model, (images, labels), case.loss_fn)[0])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 3, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 4}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "cnn", "vit", "hf_gpt2_double"])
@pytest.mark.parametrize(("schedule", "virtual_stages"), PIPELINES)
def test_every_pipeline_trains_as_the_unsplit_model(
    schedule: str, virtual_stages: int, name: str, mesh: dict[str, int], recompute: str
) -> None:
    for microbatches in (1, 2, 4):
        options = {"schedule": schedule, "virtual_stages": virtual_stages, "recompute": recompute}
        _trains_equally(name, mesh, microbatches=microbatches, **options)


@pytest.mark.slow
def test_pipelines_draw_the_same_dropout_masks() -> None:
    """The loss of every schedule is the loss of one rank, three steps long."""
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (ROWS, 8), generator=dice)
    curves = []
    for mesh, options in (
        ({"dp": 1}, {}),
        ({"pp": 2, "dp": 2}, {"microbatches": 2, "schedule": "zb-v", "virtual_stages": 2}),
        ({"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3, "recompute": "full"}),
    ):
        torch.manual_seed(0)
        batch = (ids, ids.roll(-1, 1))
        model = Dropped().double()
        model.blocks = model.blocks[:1]
        program = quintnet.compile(model, quintnet.Mesh(**mesh), batch, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
        curve = []
        for _ in range(3):
            curve.append(float(program.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
        curves.append(curve)
    assert len(set(curves[0])) == 3
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-12)


def test_the_first_half_of_a_backward_has_what_other_stages_wait_for_and_no_more() -> None:
    program = _compile("mlp", {"pp": 2}, microbatches=4, schedule="zb-h1")
    first, last = program._primary().program.stages
    assert first.weight is not None and last.weight is not None
    # nobody waits for the first stage
    assert not [n for n in first.backward.module.graph.nodes if n.op in ("call_function", "call_method")]
    # products for weights are in the second half, those for values in the first
    products = [n for n in last.weight.module.graph.nodes if n.target == "accumulate_matmul"]
    assert products and not [n for n in last.backward.module.graph.nodes if n.target == "accumulate_matmul"]
    assert not [n for n in last.weight.module.graph.nodes if n.target is torch.mm]
    assert set(last.weight.dynamic) <= {*last.saved, *last.backward.outputs}
    whole = _compile("mlp", {"pp": 2}, microbatches=4)._primary().program
    assert all(stage.weight is None for stage in whole.stages)


def test_values_are_released_after_the_weight_half() -> None:
    program = _compile("mlp", {"pp": 2}, microbatches=4, schedule="zb-h1")
    rows = program.simulate().rows
    assert [row.peak_live for row in rows] == list(verify_schedule(program.schedule, program._primary().program.edges))
    for row in rows:
        held = {point.action: point.held for point in row.memory}
        for action in program.schedule.actions[row.rank]:
            if action.op is Op.BACKWARD_WEIGHT:
                before = row.memory[[point.action for point in row.memory].index(str(action)) - 1]
                assert held[str(action)] < before.held


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_number_of_stages_that_a_schedule_does_not_have_is_refused_before_anything_runs(name: str) -> None:
    refused = {"gpipe": (), "1f1b": (2,), "interleaved": (1,), "zb-h1": (2,), "zb-v": (1, 3), "dualpipe-v": (1,)}
    for count, (mesh, microbatches) in itertools.product(refused[name], (({"pp": 2}, 4), ({"dp": 2}, 1))):
        with pytest.raises(quintnet.CompileError, match=r"QN208(?s:.*)fix: use virtual_stages="):
            quintnet.compile(
                nn.Linear(2, 2),
                quintnet.Mesh(**mesh),
                microbatches=microbatches,
                schedule=name,
                virtual_stages=count,
            )


def test_one_gradient_of_each_value_returns() -> None:
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return (self.a(x) * self.b(x) * self.c(x)).sum()

    batch = (torch.randn(4, 4, dtype=torch.double),)
    program = quintnet.compile(Fan().double(), quintnet.Mesh(pp=2), batch, plan={"stages": ["a"]})
    assert program.verify().ok
    (transfer,) = program._primary().program.transfers
    assert len(transfer.forward) == len(transfer.backward) == 1
