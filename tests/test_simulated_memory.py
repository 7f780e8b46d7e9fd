"""Predicted memory is what the runtime holds, byte by byte, after every action of every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import quintnet
from benchmarks.planned_memory import allocated
from quintnet import Mesh
from quintnet_compiler.runtime.execute.executor import Executor
from quintnet_compiler.schedules.schedule import Action
from quintnet_compiler.simulation.faults import Faults
from quintnet_compiler.simulation.rehearsal import rehearse

from .models import CASES, build

torch.set_num_threads(1)


class Inspector:
    """Counts what executors hold after each action: every piece of memory once, without state and inputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, dict[Action, int]] = {}
        self.peak_live: dict[int, int] = {}
        step = Executor.step

        def inspected(ex: Executor, state: Mapping[str, Tensor], inputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
            outside = {x.untyped_storage().data_ptr() for x in (*state.values(), *inputs)}
            rows = self.held[ex.part.rank] = {}

            def noted(handle: Callable[[Action], None]) -> Callable[[Action], None]:
                def run(action: Action) -> None:
                    handle(action)
                    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(ex)}
                    rows[action] = sum(size for where, size in storages.items() if where not in outside)

                return run

            monkeypatch.setattr(ex, "work", [(noted(handle), action) for handle, action in ex.work])
            found = step(ex, state, inputs, *rest)
            self.peak_live[ex.part.rank] = ex.peak_live
            return found

        monkeypatch.setattr(Executor, "step", inspected)


def _tensors(ex: Executor) -> Iterator[Tensor]:
    """But what waits on the host, which has memory of its own where there is a device."""
    code = "".join(stage.forward.code for stage in ex.part.stages)
    begun = set(re.findall(r"(\w+) = comm\.start_copy_out\(", code))
    away = set(re.findall(r"(\w+) = comm\.copy_out\(", code))
    away |= {name for name, start in re.findall(r"(\w+) = comm\.wait\((\w+)", code) if start in begun}
    for box in (*ex.values.values(), *ex.cotangents.values(), *ex.whole.values()):
        yield from (x for name, x in box.items() if name not in away)
    for kept in ex.results.values():
        yield from kept
    for waits in ex.sent.values():
        for wait in waits:  # in one process, what was sent is there at once
            yield wait()


PROGRAMS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp", {"dp": 2}, {"microbatches": 4}),
    ("gpt", {"tp": 2}, {"microbatches": 2}),
    ("gpt", {"pp": 3}, {"microbatches": 4, "schedule": "gpipe"}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "recompute": "full"}),
    ("hf_llama", {"pp": 2, "tp": 2}, {"microbatches": 8}),
    ("cnn", {"pp": 2}, {"microbatches": 8}),
    ("encoder", {"pp": 2, "dp": 2}, {"microbatches": 2}),
    ("gpt", {"cp": 2}, {"microbatches": 2}),
    ("mixture", {"ep": 2}, {"microbatches": 2}),
    ("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    ("cnn", {"pp": 3}, {"microbatches": 8, "schedule": "zb-h1"}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb-h1", "recompute": "full"}),
    ("vit", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v", "virtual_stages": 2}),
    ("mlp", {"dp": 4}, {"microbatches": 2, "zero": 1}),
    ("mixture", {"dp": 2}, {"zero": 2, "microbatches": 2}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 3}),
    ("gpt", {"dp": 2, "tp": 2}, {"microbatches": 2, "zero": 3, "reshard_after_forward": False}),
    ("gpt", {"tp": 2}, {"microbatches": 2, "async_tp": True, "overlap": False, "reshard_after_forward": False}),
    ("gpt", {"dp": 2, "tp": 2}, {"microbatches": 2, "precision": "bf16", "sum_dtype": "float32"}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "precision": "bf16", "zero": 1, "schedule": "zb-h1"}),
    ("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "precision": "bf16", "zero": 3, "recompute": "full"}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "loss_chunks": 3}),
    ("gpt", {"pp": 2, "tp": 2}, {"microbatches": 4, "offload": ("activations",)}),
    ("cnn", {"pp": 3}, {"microbatches": 8, "schedule": "zb-h1", "offload": ("activations",)}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, mesh, options", PROGRAMS, ids=lambda value: str(value))
def test_bytes_and_live_activations(
    name: str, mesh: dict[str, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    batch = case.batch(8)
    dtype = torch.float32 if "precision" in options else torch.float64
    program = quintnet.compile(build(name, dtype), Mesh(**mesh), batch, loss_fn=case.loss_fn, **options)
    inspector = Inspector(monkeypatch)
    program.step(batch)
    monkeypatch.undo()
    footprints = rehearse(program._primary().program, processes=False)
    for part in program.ranks:
        found = footprints[part.coordinate.get("pp", 0)]
        predicted = dict(zip(part.actions, (point.held for point in found.points), strict=True))
        held = inspector.held[part.rank]
        assert held == {action: predicted[action] for action in held}
        assert max(held.values()) == max(predicted.values()) > 0
        assert found.peak_live == inspector.peak_live[part.rank]
        assert all(point.peak + point.gradients >= point.held for point in found.points)


@pytest.mark.sample(1)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt", "mixture"])
def test_the_peak_is_what_the_allocator_says(name: str, microbatches: int) -> None:
    """To the byte: also of what functions make and drop, and of slices of a batch, which free nothing."""
    case, module = CASES[name], build(name)
    batch = case.batch(8)
    program = quintnet.compile(module, Mesh(dp=1), batch, loss_fn=case.loss_fn, microbatches=microbatches)
    (row,) = program.simulate().rows
    most, after = allocated(program, module, batch)  # gradients are there before a step and after it
    assert (most + row.gradient_bytes, after) == (row.peak.gradients + row.peak.values, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mlp", "gpt", "cnn"])
def test_an_estimate_has_room_for_what_is_simulated(name: str) -> None:
    """The planner adds up units: what one received and saved as a view counts, too."""
    case = CASES[name]
    batch, cpu = case.batch(8), quintnet.Cluster("cpu", 1, 1)
    program = quintnet.compile(build(name), Mesh(dp=1), batch, loss_fn=case.loss_fn, check="off")
    (found,) = quintnet.estimate(build(name), cpu, batch, {"mesh": {"dp": 1}}, loss_fn=case.loss_fn).memory
    assert found.saved >= program.simulate().rows[0].peak_held - 128  # made once: positions, a count, the loss
    peak = program.simulate().peak
    assert found.gradients + found.saved + found.working >= peak.gradients + peak.values


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_estimate_has_room_for_what_stages_send(schedule: str) -> None:
    """Values until their gradients are there, gradients under way, and buffers of the next ones."""
    case, mesh = CASES["mlp"], {"pp": 2, "dp": 2}
    batch, cpu = case.batch(32), quintnet.Cluster("cpu", 1, 4)
    plan: dict[str, Any] = {"mesh": mesh, "microbatches": 4, "schedule": schedule}
    planned = quintnet.estimate(build("mlp"), cpu, batch, plan, loss_fn=case.loss_fn)
    plan["stages"] = list(planned.begins)
    program = quintnet.compile(build("mlp"), Mesh(**mesh), batch, loss_fn=case.loss_fn, plan=plan, check="off")
    rows = sorted(program.simulate(cpu).rows, key=lambda row: row.rank)
    for one, row in zip(planned.memory, rows, strict=True):
        assert one.gradients + one.saved + one.working >= row.peak.gradients + row.peak.values


def test_results_that_nobody_reads_die_at_once() -> None:
    """One of three results of a group norm is read by the next operator alone: behind it, the forward holds two."""
    case = CASES["cnn"]
    program = quintnet.compile(build("cnn"), Mesh(dp=1), case.batch(8), loss_fn=case.loss_fn, check="off")
    first = program.simulate().rows[0].memory[0]
    assert first.peak - first.held <= 2 * 8 * 8 * 8 * 8 * 8  # two images of 8 x 8 with 8 channels, of 8 rows


@pytest.mark.slow
def test_a_program_is_simulated_ahead_of_time() -> None:
    case = CASES["gpt"]
    program = quintnet.compile(build("gpt"), Mesh(dp=256, pp=2, tp=4), case.batch(1024), microbatches=4)
    report = program.simulate()
    assert report.ranks == 2048 and [row.count for row in report.rows] == [1024, 1024]
    assert [row.peak_live for row in report.rows] == [2, 1]
    assert report.peak.bytes > report.peak.values > 0 and report.peak.action in str(report)
    assert set(report.exposed) >= {"tp", "pp"}
    assert report.to_json() == program.simulate().to_json()
    slow = program.simulate(faults=Faults({3: 2.0}))
    assert slow.seconds > report.seconds and sum(row.count for row in slow.rows) == 2048


@pytest.mark.slow
def test_boundary_values_are_freed_during_the_step() -> None:
    """What a rank keeps does not grow with the microbatches that 1F1B runs."""
    case = CASES["gpt"]
    peaks = []
    for microbatches in (8, 16):
        batch = case.batch(2 * microbatches)
        program = quintnet.compile(build("gpt"), Mesh(pp=2), batch, microbatches=microbatches)
        whole = max(row.peak_held for row in program.simulate().rows)
        peaks.append(whole)
    labels = 8 * 8 * 2 * 16  # the batch's labels and masks, which last all step, do grow
    assert peaks[1] - peaks[0] < labels
