"""Calibration: the document, interpolation, prices of compiled programs, and predicted against measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import quintnet
from benchmarks.compare_costs import compare_costs
from quintnet import CompileError, Mesh
from quintnet_compiler.cli import app
from quintnet_compiler.cost_models.calibrated import CalibratedCosts
from quintnet_compiler.cost_models.calibration import (
    Calibration,
    MeasuredCollective,
    MeasuredMatmul,
    Point,
    interpolated,
    matmul_seconds,
)
from quintnet_compiler.reports import calibrate as measuring

from .models import CASES, build

torch.set_num_threads(1)
FAMILIES = (
    "add", "copy", "sum", "tanh", "gelu", "gelu_backward", "layer_norm", "layer_norm_backward", "softmax",
    "softmax_backward", "embedding", "embedding_backward", "attention", "attention_backward",
)  # fmt: skip
LINE = (Point(size=1e3, seconds=1e-6), Point(size=1e9, seconds=1.0))


def machine(cores: int = 0) -> Calibration:
    """1 GFLOP/s, 1 GB/s, and a collective of 10 µs at least."""
    sides = (4, 64, 1024)
    products = [
        MeasuredMatmul(order=order, m=m, k=k, n=n, seconds=2e-9 * m * k * n)
        for order in ("nn", "nt", "tn") for m in sides for k in sides for n in sides
    ]  # fmt: skip
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    link = (Point(size=1e4, seconds=1e-5), Point(size=1e9, seconds=1.0))
    return Calibration(
        machine="a test", torch="2", device="cpu", dtype="float32", cores=cores, overlaps=False, action_seconds=1e-6,
        view_seconds=1e-7, products=tuple(products), operators=dict.fromkeys(FAMILIES, LINE),
        collectives=tuple(MeasuredCollective(name=name, ranks=n, points=link) for name in names for n in (2, 4)),
    )  # fmt: skip


def test_interpolation() -> None:
    assert interpolated(LINE, 10) == 1e-6  # never less than the smallest
    assert interpolated(LINE, 1e6) == pytest.approx(1e-3)
    assert interpolated(LINE, 4e9) == pytest.approx(4.0)
    products = machine().products
    for m, k, n in ((64, 64, 64), (100, 300, 20), (4096, 64, 7)):
        assert matmul_seconds(products, "nt", m, k, n) == pytest.approx(2e-9 * m * k * n)


def test_the_document_keeps_its_values_and_refuses_others(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(2).save(path)
    assert Calibration.load(path) == machine(2)
    good = json.loads(path.read_text())
    for bad in ({**good, "colour": 1}, {**good, "version": 2}, {**good, "products": []}, {**good, "view_seconds": -1}):
        path.write_text(json.dumps(bad))
        with pytest.raises(CompileError, match="QN211"):
            Calibration.load(path)
    path.write_text("{")
    with pytest.raises(CompileError, match="QN211"):
        Calibration.load(path)
    with pytest.raises(CompileError, match="QN211"):
        Calibration.load(tmp_path / "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_programs_are_priced_node_by_node(mesh: dict[str, int]) -> None:
    case = CASES["gpt"]
    batch = case.batch(8)
    program = quintnet.compile(build("gpt", torch.float32), Mesh(**mesh), batch, microbatches=2)
    alone = program.simulate(CalibratedCosts(machine()))
    shared = program.simulate(CalibratedCosts(machine(cores=1)))
    assert 0 < alone.seconds < shared.seconds <= 4.01 * alone.seconds
    assert "share 1 cores" in str(shared)
    found = program._primary().program
    program.step(batch)
    report = compare_costs(found, program._backend, list(batch), CalibratedCosts(machine()), steps=1)  # type: ignore[arg-type]
    off = [abs(one.predicted - one.measured) for one in report.operators]
    assert off == sorted(off, reverse=True) and report.measured > 0
    assert "aten.mm.default" in str(report) and json.loads(report.to_json())["operators"]


@pytest.mark.slow
def test_what_was_not_measured_has_no_price() -> None:
    case = CASES["cnn"]
    program = quintnet.compile(build("cnn"), Mesh(dp=2), case.batch(4), loss_fn=case.loss_fn)
    with pytest.raises(CompileError, match=r"QN210(?s:.*)convolution"):
        program.simulate(CalibratedCosts(machine()))
    three = quintnet.compile(build("mlp"), Mesh(dp=3), CASES["mlp"].batch(6), loss_fn=CASES["mlp"].loss_fn)
    with pytest.raises(CompileError, match=r"QN210(?s:.*)over 3 ranks"):
        three.simulate(CalibratedCosts(machine()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_priced_in_the_dtype_that_was_measured(dtype: str) -> None:
    case = CASES["gpt"]
    program = quintnet.compile(build("gpt", torch.float32), Mesh(dp=2), case.batch(8), precision="bf16", check="off")
    costs = CalibratedCosts(machine().model_copy(update={"dtype": dtype}))
    if dtype == "bfloat16":
        assert program.simulate(costs).seconds > 0
    else:
        with pytest.raises(CompileError, match=r"QN210(?s:.*)not in bfloat16(?s:.*)--dtype bfloat16"):
            program.simulate(costs)


def test_measuring_in_16_bits() -> None:
    effort = measuring.CalibrationEffort(1, 1e-5, (8,), (4, 16), (512,), dtype=torch.bfloat16)
    taken, samples = measuring._operators(effort)
    assert len(taken) == len(samples) and {one.family for one in samples} >= set(FAMILIES) - {
        "attention",
        "attention_backward",
    }
    assert all(seconds > 0 for seconds in taken)


def test_operands_and_results_take_turns() -> None:
    """Else all of a measurement would lie in a core's caches."""
    effort = measuring.CalibrationEffort(pool=4096)
    new = measuring._Operands(effort, torch.device("cpu"))
    places: list[int] = []

    def make() -> Callable[[], object]:
        x = new(8, 8)
        return lambda: places.append(x.data_ptr())

    call = new.turns(1024.0, make)
    for _ in range(8):
        call()
    assert len(set(places[:4])) == 4 and places[4:] == places[:4]
    assert new(64, 64).shape == (64, 64)  # larger than the pool


def test_measuring_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = measuring.CalibrationEffort(1, 1e-5, (8, 16), (4, 16), (512, 4096))
    found = measuring.calibrate((2,), effort)
    assert {one.name for one in found.collectives} == {*measuring.COLLECTIVES, "send"}
    assert set(found.operators) >= set(FAMILIES) - {"attention", "attention_backward"}
    assert len(found.products) == 3 * 2**3
    monkeypatch.setattr("quintnet_compiler.reports.calibrate.calibrate", lambda ranks, effort: found)
    path = tmp_path / "machine.json"
    done = CliRunner().invoke(app, ["calibrate", "--out", str(path), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(path.read_text())
    assert Calibration.load(path) == found and "GFLOP/s" in CliRunner().invoke(app, ["calibrate"]).stdout
