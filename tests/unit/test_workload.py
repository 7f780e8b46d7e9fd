"""Figures of a step for who rents the devices: by hand, and from the command line."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import quintnet
from quintnet_compiler.cli import app
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.hardware import HARDWARE
from quintnet_compiler.planner.workload import Goal, Workload, four_digits, long_time, tokens_of

from ..models import CASES, GPT

GPT_ROWS = 4
TARGET = "tests.unit.test_workload:gpt"


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A target of the command line."""
    return GPT(width=64, depth=4, heads=4), CASES["gpt"].batch(GPT_ROWS)


def test_figures_by_hand() -> None:
    """8 H100 for 2 s: 4096 tokens of 8e15 FLOP, at 989.4 TFLOP/s and 700 W each, and 2.5 an hour."""
    found = Workload(4, 4096, 8e15, "bf16", HARDWARE["h100"], Goal(1e12, 2.5)).figures(2.0, 8)
    assert (found.unit, found.per_second, found.per_second_per_device) == ("token", 2048, 256)
    assert found.utilisation == pytest.approx(8e15 / (8 * 2 * 989.4e12))
    assert found.joules == 8 * 2 * 700
    assert found.cost_per_million == pytest.approx(8 * 2 / 3600 * 2.5 / 4096 * 1e6)
    assert found.train_seconds == pytest.approx(1e12 / 2048)
    assert found.train_cost == pytest.approx(found.train_seconds * 8 / 3600 * 2.5)
    assert found.train_joules == pytest.approx(found.train_seconds * 8 * 700)


def test_what_is_not_known_is_left_out() -> None:
    load = Workload(4, 0, 0.0, "fp32", HARDWARE["cpu"])
    found = load.figures(2.0, 8)
    assert (found.unit, found.per_second, found.share) == ("row", 2, "-")
    numbers = found.numbers()
    assert numbers["rows_per_second_per_device"] == 0.25 and numbers["counted"] == "rows"
    absent = "model_flop_utilisation", "step_joules", "cost_per_million_rows", "train_seconds", "train_cost"
    assert [numbers[name] for name in absent] == [None] * 5
    assert load.text(found) == ["a step is 4 rows: 2.000 rows/s, 0.2500 per device"]


def test_only_a_goal_and_only_a_price() -> None:
    load = Workload(4, 4096, 8e15, "bf16", HARDWARE["h100"], Goal(tokens=1e12))
    lines = load.text(load.figures(2.0, 8))
    assert lines[-1].startswith("1e+12 tokens take 5,651.4 days, use ") and not any("cost" in one for one in lines)
    load = Workload(4, 4096, 8e15, "bf16", HARDWARE["h100"], Goal(price=2.5))
    assert load.text(load.figures(2.0, 8))[-1] == "a million tokens cost 2.713, at 2.5 a device hour"


@pytest.mark.parametrize("number", [0, -1.0, math.inf, math.nan, "2", True])
def test_a_goal_is_a_number_above_0(number: Any) -> None:
    with pytest.raises(CompileError, match=r"QN216.*\n.*price="):
        Goal(price=number)
    with pytest.raises(CompileError, match=r"QN216.*\n.*tokens="):
        quintnet.estimate(nn.Linear(2, 2), quintnet.Cluster("h100"), (torch.randn(2, 2),), {}, tokens=number)


def test_numbers_for_people() -> None:
    assert [four_digits(x) for x in (0, 0.00012345, 1.5)] == ["0", "0.0001234", "1.500"]
    assert [four_digits(x) for x in (12345.6, 99999.9)] == ["12,350", "100,000"]
    assert (long_time(5400), long_time(86400 * 24.13)) == ("1.5 hours", "24.1 days")


def test_tokens_are_positions_of_whole_numbers() -> None:
    ids, pixels, labels = torch.zeros(4, 7, dtype=torch.long), torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
    assert tokens_of([torch.zeros(4, 5), ids, labels]) == 28
    assert tokens_of([pixels, labels]) == 0 and tokens_of([labels, 3, None]) == 0


@pytest.mark.slow
def test_flops_are_those_of_the_unsplit_model_whatever_the_layout() -> None:
    model, batch = gpt()
    program = quintnet.compile(model, quintnet.Mesh(dp=1), batch, check="off")
    cluster = quintnet.Cluster("a100", 1, 4)
    for plan in ({"mesh": {"dp": 2, "tp": 2}}, {"mesh": {"pp": 2}, "microbatches": 2, "recompute": "full"}):
        found = quintnet.estimate(model, cluster, batch, plan)
        assert found.figures.flops == program.model_flops
        assert found.figures.devices == math.prod(plan["mesh"].values())  # type: ignore[attr-defined]
        assert found.workload and (found.workload.dtype, found.workload.tokens) == ("fp32", batch[0].numel())
    mixed = quintnet.estimate(model, cluster, batch, {"mesh": {"dp": 2}, "precision": "bf16"})
    assert mixed.workload and mixed.workload.dtype == "bf16" and "312 TFLOP/s (bf16)" in str(mixed)


def test_rows_where_there_are_no_tokens() -> None:
    model, batch = nn.Linear(64, 8), (torch.randn(16, 64), torch.randint(0, 8, (16,)))
    cluster = quintnet.Cluster("rtx-4090", 1, 2)
    report = quintnet.plan(model, cluster, batch, loss_fn=F.cross_entropy, price=0.4, tokens=1e6, top_k=2)
    assert "rows/s/device" in str(report) and "per million" in str(report) and "1e+06 rows take" in str(report)
    first = json.loads(report.to_json())["plans"][0]
    assert first["counted"] == "rows" and first["rows_per_second"] == pytest.approx(16 / first["step_seconds"])


def test_objectives_are_those_that_there_are() -> None:
    with pytest.raises(CompileError, match=r"QN216.*\n.*no objective 'speed'\n.*time, memory, cost"):
        quintnet.plan(nn.Linear(2, 2), quintnet.Cluster("h100"), (torch.randn(2, 2),), objective="speed")  # type: ignore[arg-type]


# -- the command line


@pytest.mark.slow
def test_estimate_takes_a_mesh_a_precision_a_goal_and_a_price() -> None:
    given = "--mesh", "dp=2,tp=2", "--precision", "bf16", "--tokens", "1e9", "--price", "2", "--gpu", "l40s"
    said = CliRunner().invoke(app, ["estimate", TARGET, *given, "--json"])
    plan = {"mesh": {"dp": 2, "tp": 2}, "precision": "bf16"}
    model, batch = gpt()
    found = quintnet.estimate(model, quintnet.Cluster("l40s"), batch, plan, tokens=1e9, price=2)
    assert said.exit_code == 0 and json.loads(said.stdout) == json.loads(found.to_json())


def test_estimate_without_a_mesh_or_with_two_is_refused(tmp_path: object) -> None:
    assert CliRunner().invoke(app, ["estimate", TARGET]).exit_code == 2
    path = f"{tmp_path}/plan.json"
    quintnet.Plan(mesh={"dp": 2}).save(path)
    said = CliRunner().invoke(app, ["estimate", TARGET, "--plan", path, "--mesh", "tp=2"])
    assert said.exit_code == 4 and "QN207" in said.stderr
    said = CliRunner().invoke(app, ["estimate", TARGET, "--mesh", "tp=2", "--price", "0"])
    assert said.exit_code == 4 and "QN216" in said.stderr


@pytest.mark.slow
def test_plan_takes_an_objective_a_precision_and_a_price() -> None:
    given = ["--objective", "cost", "--precision", "bf16", "--price", "2", "--work", "500", "--gpus-per-node", "2"]
    said = CliRunner().invoke(app, ["plan", TARGET, *given, "--json"])
    assert said.exit_code == 0, said.stderr
    best = json.loads(said.stdout)["plans"][0]
    assert best["plan"]["precision"] == "bf16" and best["cost_per_million_tokens"] > 0
    assert CliRunner().invoke(app, ["plan", TARGET, "--objective", "speed"]).exit_code == 2
