"""Decisions of which a caller lists several values; and losses in parts where nothing fits without."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import quintnet
from quintnet_compiler.cli import app
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.hardware import HARDWARE
from quintnet_compiler.planner.asking import Questions
from quintnet_compiler.planner.report import PlanReport
from quintnet_compiler.planner.search import SearchEffort

pytestmark = pytest.mark.usefixtures("shared_captures")

PINNED = {"microbatches": 1, "recompute": "none"}
CHUNKS = 8


class Words(nn.Module):
    def __init__(self, classes: int = 2048, width: int = 32) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(classes, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.inner(self.table(ids))))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """A target of the command line."""
    torch.manual_seed(0)
    ids = torch.randint(0, 2048, (8, 32))
    return Words(), (ids, ids), loss


def _planned(memory_bytes: float = 8e10, **options: Any) -> PlanReport:
    model, batch, loss_fn = words()
    device = replace(HARDWARE["a100"], name="small", memory_bytes=memory_bytes)
    cluster = quintnet.Cluster(device, nodes=1, gpus_per_node=2)
    given = {"plan": PINNED, "reserve": 0.0, "top_k": 1} | options
    return quintnet.plan(model, cluster, batch, loss_fn=loss_fn, **given)


@functools.cache
def _listed() -> PlanReport:
    return _planned(among={"loss_chunks": (1, CHUNKS), "async_tp": (False, True)})


@pytest.mark.slow
def test_the_best_of_listed_decisions_is_the_best_of_all_searches() -> None:
    report = _listed()
    apart = {}
    for chunks in (1, CHUNKS):
        for fused in (False, True):
            made = _planned(plan={**PINNED, "loss_chunks": chunks, "async_tp": fused})
            assert made.found.complete and not made.alternatives
            apart[chunks, fused] = made.found.ranked[0].seconds
    found = {tuple(one.decisions.values()): one.found.seconds for one in report.alternatives if one.found}
    assert found == apart and report.found.ranked[0].seconds == min(apart.values())
    best = min(apart, key=lambda one: apart[one])
    assert (report.best.loss_chunks, report.best.async_tp) == best


@pytest.mark.slow
def test_a_report_has_the_best_of_each_listed_decision() -> None:
    report = _listed()
    assert f"  loss_chunks={CHUNKS}, async_tp=False: " in str(report)
    assert [one["decisions"] for one in report.numbers()["alternatives"]] == [
        {"loss_chunks": chunks, "async_tp": fused} for chunks in (1, CHUNKS) for fused in (False, True)
    ]
    assert report.why_not(mesh={"dp": 2}).best == report.found.ranked[0]


def test_precisions_are_listed_and_say_what_each_costs() -> None:
    report = _planned(among={"precision": ("model", "bf16")}, plan={**PINNED, "mesh": {"dp": 2}})
    one, other = report.alternatives
    assert one.found and other.found and one.name == "precision=model"
    assert one.found.workload and one.found.workload.dtype == "fp32"
    assert other.found.workload and other.found.workload.dtype == "bf16"
    assert report.best.precision == min(report.alternatives, key=lambda a: a.found.seconds).decisions["precision"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_plan_that_only_fits_with_its_loss_in_parts_is_found_and_runs() -> None:
    least = {}
    for chunks in (1, CHUNKS):
        ask = _planned(plan={**PINNED, "loss_chunks": chunks}).ask
        assert isinstance(ask, Questions)
        least[chunks] = ask.planner.search(1, "memory", SearchEffort(), pricing=ask.pricing).ranked[0].claimed_bytes
    assert least[CHUNKS] < 0.7 * least[1]
    report = _planned((least[1] + least[CHUNKS]) / 2)
    assert report.best.loss_chunks == CHUNKS and f"in {CHUNKS} parts (loss_chunks): nothing fits without" in str(report)
    model, batch, loss_fn = words()
    program = quintnet.compile(
        model.double(), quintnet.Mesh(**report.best.mesh), batch, loss_fn=loss_fn, plan=report.best, device="cpu"
    )
    assert program.verify().ok
    model, *_ = words()
    single = quintnet.compile(
        model, quintnet.Mesh(**report.best.mesh), batch, loss_fn=loss_fn, plan=report.best, device="cpu"
    )
    planned = max(one.gradients + one.saved + one.working for one in report.found.ranked[0].memory)
    assert max(row.peak.gradients + row.peak.values for row in single.simulate().rows) <= 1.01 * planned


def test_nothing_is_computed_in_parts_where_that_is_decided_or_does_not_help() -> None:
    with pytest.raises(CompileError, match="QN212"):
        _planned(1e6, plan={**PINNED, "loss_chunks": 1, "offload": (), "mesh": {"dp": 2}})


def test_what_cannot_be_listed_is_refused() -> None:
    for among in ({"mesh": ({"tp": 2},)}, {"precision": "bf16"}, {"loss_chunks": ()}):
        with pytest.raises(CompileError, match="QN216"):
            _planned(among=among)
    with pytest.raises(CompileError, match="QN207"):
        _planned(among={"loss_chunks": (0,)})


@pytest.mark.slow
def test_the_command_line_lists_decisions() -> None:
    target = ["plan", f"{__name__}:words", "--gpu", "a100", "--gpus-per-node", "2", "--set", "microbatches=1"]
    done = CliRunner().invoke(app, [*target, "--set", "zero=0", "--among", f"loss_chunks=1,{CHUNKS}"])
    assert done.exit_code == 0 and f"loss_chunks={CHUNKS}: " in done.output
