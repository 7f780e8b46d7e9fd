"""cli, verb by verb, on a model of two layers: what each answers, and what it refuses in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from torch import nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.cli.answer import Answer
from quintnet_compiler.cli.cache import cache
from quintnet_compiler.cli.diff import diff
from quintnet_compiler.cli.doctor import doctor
from quintnet_compiler.cli.dump import dump
from quintnet_compiler.cli.estimate import estimate
from quintnet_compiler.cli.explain import explain
from quintnet_compiler.cli.goodput import goodput
from quintnet_compiler.cli.inputs.options import ProgramOptions, build_program, costs_of, parse_mesh, settings_of
from quintnet_compiler.cli.inputs.targets import from_config, load_target
from quintnet_compiler.cli.measure import measure
from quintnet_compiler.cli.plan import plan
from quintnet_compiler.cli.simulate import simulate
from quintnet_compiler.cli.train import train
from quintnet_compiler.cli.verify import verify
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ir.plan import Plan, read_plan
from quintnet_compiler.reports import doctor as examining
from quintnet_compiler.training.time_report import RunStart, RunTime

TARGET = f"{__name__}:small"


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], object]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, (torch.ones(4, 4), torch.zeros(4, dtype=torch.long)), F.cross_entropy


def nothing() -> None:
    return None


def test_meshes_of_options() -> None:
    assert parse_mesh("pp=2, dp=3") == Mesh(pp=2, dp=3)
    for text in ("tp", "tp=x", "tp=2,tp=2"):
        with pytest.raises(typer.BadParameter, match="is not AXIS=SIZE"):
            parse_mesh(text)
    with pytest.raises(CompileError):
        parse_mesh("no=2")
    assert costs_of(None) is None


def test_targets() -> None:
    model, batch, loss_fn = load_target(TARGET)
    assert isinstance(model, nn.Sequential) and batch[0].shape == (4, 4) and loss_fn is F.cross_entropy
    again, _, _ = load_target(TARGET)
    assert torch.equal(again[0].weight, model[0].weight)  # seeded
    for target, told in (
        ("no colon", "is not package.module:builder"),
        (f"{__name__}:missing", "AttributeError"),
        (f"{__name__}:nothing", "must return model, batch"),
        ("no.such.module:f", "cannot be loaded: ModuleNotFoundError"),
    ):
        with pytest.raises(typer.BadParameter, match=told):
            load_target(target)


def test_hugging_face_configurations(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16}))
    for path in (file, tmp_path):
        model, batch, loss_fn = from_config(f"hf:{path},rows=2,sequence=4")
        assert type(model).__name__ == "GPT2LMHeadModel" and model.device.type == "meta" and loss_fn is None
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 4)
    for option in ("rows=0", "columns=3"):
        with pytest.raises(typer.BadParameter, match="is neither rows=NUMBER nor sequence=NUMBER"):
            from_config(f"hf:{file},{option}")
    file.write_text("{}")
    with pytest.raises(typer.BadParameter, match="it has no model_type"):
        from_config(f"hf:{file}")


def test_a_target_needs_a_mesh_or_a_plan_with_one() -> None:
    with pytest.raises(typer.BadParameter, match="give one, or a plan that has one"):
        ProgramOptions.from_arguments(None, None)
    program = build_program(TARGET, ProgramOptions.from_arguments("dp=2", None, 2))
    assert program.mesh == Mesh(dp=2) and program.plan.microbatches == 2


@pytest.mark.slow
def test_decisions_are_set_by_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    Plan(mesh={"dp": 2}, zero=1, seed=3).save(file)
    program = build_program(TARGET, ProgramOptions.from_arguments(None, file, None, ["zero=2", "microbatches=2"]))
    assert program.mesh == Mesh(dp=2)
    assert (program.plan.zero, program.plan.seed, program.plan.microbatches) == (2, 3, 2)
    with pytest.raises(typer.BadParameter, match="says another number"):
        ProgramOptions.from_arguments(None, file, 4, ["microbatches=2"])
    for text, told in (
        ("zero=4", "zero=4: zero is one of 0, 1, 2, 3"),
        ("zer=1", "there is no option 'zer'; did you mean zero"),
        ("microbatches=0", "microbatches: Input should be greater than or equal to 1"),
    ):
        with pytest.raises(typer.BadParameter, match=told) as refused:
            settings_of([text])
        assert refused.value.param_hint == "--set"
    found = json.loads(plan(TARGET, gpus_per_node=2, settings=["zero=0", "precision=bf16"], top=1).document)
    assert found["plans"][0]["plan"]["precision"] == "bf16" and found["plans"][0]["plan"]["zero"] == 0
    priced = json.loads(estimate(TARGET, file, gpus_per_node=2, settings=["microbatches=2"]).document)
    assert priced["layout"].startswith("dp=2, 2 x 1 rows")
    mixed = json.loads(estimate(TARGET, file, gpu="a100:1:1+h100:1:1", settings=["zero=0"]).document)
    assert mixed["places"][0]["devices"] == "1 x A100-SXM-80GB + 1 x H100-SXM-80GB"
    cards = json.loads(estimate(TARGET, file, gpu="rtx-4090,rtx-3090-nvlink").document)
    assert cards["places"][0]["memory_bytes"] < 24 * 2**30


@pytest.mark.slow
def test_verbs_about_one_program(tmp_path: Path) -> None:
    assert "0.weight" in explain(TARGET, "0", mesh="tp=2").text
    assert json.loads(simulate(TARGET, mesh="tp=2").document)["seconds"] > 0
    checked = verify(TARGET, mesh="tp=2")
    assert checked.code == 0 and json.loads(checked.document)["ok"]
    made = dump(TARGET, tmp_path / "a", mesh="tp=2")
    assert "index.html" in json.loads(made.document)["files"] and (tmp_path / "a/index.html").is_file()
    dump(TARGET, tmp_path / "b", mesh="dp=2")
    assert json.loads(diff(tmp_path / "a", tmp_path / "a").document)["equal"]
    assert "mesh: " in diff(tmp_path / "a", tmp_path / "b").text
    with pytest.raises(typer.BadParameter, match="is no dump"):
        diff(tmp_path / "a", tmp_path)


@pytest.mark.slow
def test_a_plan_is_found_written_and_priced(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    found = plan(TARGET, nodes=1, gpus_per_node=2, out=out)
    assert json.loads(found.document)["plans"] and read_plan(out).mesh
    assert json.loads(estimate(TARGET, out, nodes=1, gpus_per_node=2).document)["step_seconds"] > 0


def test_errors_are_explained() -> None:
    assert "the layout does not divide" in explain("qn203").text
    with pytest.raises(typer.BadParameter, match="no such error"):
        explain("QN999")


def test_verbs_that_start_processes_refuse_before_they_start_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examining, "launch", lambda *_, **__: [3.0, 3.0])
    report = doctor()
    assert isinstance(report, Answer) and "gloo" in json.loads(report.document)["backends"]
    with pytest.raises(typer.BadParameter, match="give one, or a plan that has one"):
        measure(TARGET)
    with pytest.raises(CompileError, match=r"missing\.yaml"):
        train(tmp_path / "missing.yaml")


@pytest.mark.slow
def test_cache_lists_programs_and_removes_old_ones(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    with pytest.raises(typer.BadParameter, match="no folder"):
        cache(folder)
    model, batch, loss_fn = small()
    for axes in ({"tp": 2}, {"dp": 2}):
        quintnet.compile(model, Mesh(**axes), batch, loss_fn=loss_fn, cache=folder)
    (folder / ".0123456789abcdef.tmp").write_text("half")
    (folder / "notes").write_text("of somebody else")
    found = json.loads(cache(folder).document)["files"]
    assert sorted(one["about"].get("mesh", "") for one in found) == ["", "Mesh(dp=2)", "Mesh(tp=2)"]
    of_tp, half = (next(f for f in found if f["about"].get("mesh", "") == mesh) for mesh in ("Mesh(tp=2)", ""))
    os.utime(folder / of_tp["name"], (0, 0))
    answer = cache(folder)
    line = next(line for line in answer.text.splitlines() if "Mesh(tp=2)" in line)
    assert "Sequential of 76 parameters, training, Mesh(tp=2), rows 4, device cpu" in line and torch.__version__ in line
    assert answer.text.splitlines()[-1].startswith("3 programs, ")
    assert "removed: 1 program, " in cache(folder, unused=30.0).text
    assert not (folder / of_tp["name"]).exists() and (folder / half["name"]).exists()
    quintnet.compile(model, Mesh(dp=2), batch, loss_fn=loss_fn, cache=folder)  # used now: the half file is older
    cache(folder, most=json.loads(cache(folder).document)["files"][0]["size"] / 2**30)
    assert sorted(one["about"]["mesh"] for one in json.loads(cache(folder).document)["files"]) == ["Mesh(dp=2)"]
    cache(folder, most=0.0)
    assert [one.name for one in folder.iterdir()] == ["notes"]
    folder.chmod(0o755)
    with pytest.raises(CompileError, match=r"QN701 [\s\S]*others may use the folder"):
        cache(folder)


def test_goodput_reads_what_a_run_has_written(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"no time\.json"):
        goodput(tmp_path)
    RunTime(starts=[RunStart(began=0.0, until=4.0, step=2, spent={"step": 3.0, "other": 1.0})]).write(tmp_path)
    answer = goodput(tmp_path)
    assert (
        answer.text.startswith("4.0 s, 1 start, step 2: 75.0% steps") and json.loads(answer.document)["goodput"] == 0.75
    )
