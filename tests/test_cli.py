"""The command line: targets, answers as JSON and nothing else, exit codes."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner, Result

import quintnet
from quintnet_compiler.cli import answer, app
from quintnet_compiler.cli.app import VERBS, loaded
from quintnet_compiler.core.error_help import ErrorHelp, error_help
from quintnet_compiler.core.error_table import ERRORS
from quintnet_compiler.core.errors import (
    CheckpointError,
    CompileError,
    FaultWarning,
    InputError,
    QuintNetError,
    RunError,
)
from quintnet_compiler.core.files import save_text
from quintnet_compiler.reports import doctor as examining

ROOT = Path(__file__).parent.parent
MODULE = """
import torch, torch.nn as nn, torch.nn.functional as F
print("noise of an import")

def build():
    print("noise of a builder")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model, (torch.randn(8, 16), torch.randint(0, 8, (8,))), F.cross_entropy

class Clamped(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp_(-1, 1))

def clamped():
    return Clamped(16, 16), (torch.randn(8, 16), torch.randn(8, 16)), F.mse_loss

def huge():
    with torch.device("meta"):
        return nn.Linear(2**19, 2**19, bias=False), (torch.zeros(8, 2**19), torch.zeros(8, 2**19)), F.mse_loss

def fails():
    return [][1]

def leaves():
    raise SystemExit("bye")

def one():
    return nn.Linear(2, 2)

number = 3
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
PLAIN = ("cli_target:build", "--mesh", "pp=2,tp=2", "--microbatches", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli")
    (made / "cli_target.py").write_text(MODULE)
    (made / "cli_broken.py").write_text("def build(:\n")
    (made / "llama.json").write_text(json.dumps(LLAMA))
    (made / "list.json").write_text("[]")
    return made


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_target", raising=False)


def _run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def _document(*args: str, code: int = 0) -> Any:
    done = _run(*args, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)  # pure: the target prints, and that is not in it


def test_every_verb_gives_pure_json() -> None:
    assert _document("verify", *PLAIN, "--float64")["ok"]
    assert _document("simulate", *PLAIN)["seconds"] > 0
    assert "2.weight" in _document("explain", "cli_target:build", "2", "--mesh", "tp=2")["text"]
    small = "--nodes", "1", "--gpus-per-node", "2"
    assert _document("plan", "cli_target:build", *small, "--out", "plan.json")["plans"]
    assert _document("estimate", "cli_target:build", *small, "--plan", "plan.json")["step_seconds"] > 0
    assert _document("simulate", "cli_target:build", "--plan", "plan.json")["ranks"] == 2  # the plan has the mesh
    done = _run("simulate", *PLAIN)
    assert "noise of a builder" in done.stdout and "bubble" in done.stdout  # without --json nothing is moved


def test_an_answer_goes_nowhere_else(capfd: pytest.CaptureFixture[str]) -> None:
    """Not even what a started process, or a library, writes to the descriptor."""
    with answer._aside():
        print("printed")
        os.write(1, b"written\n")
    found = capfd.readouterr()
    assert found.out == "" and "printed" in found.err and "written" in found.err


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("cli_target", "is not package.module:builder"),
        ("a b:build", "is not package.module:builder"),
        ("cli_missing:build", "No module named 'cli_missing'"),
        ("cli_target:nothing", "has no attribute 'nothing'"),
        ("cli_target:number", "number is a int, and no function"),
        ("cli_target:fails", "IndexError: list index out of range (cli_target.py:23)"),
        ("cli_target:leaves", "SystemExit: bye (cli_target.py:26)"),
        ("cli_target:one", "must return model, batch[, loss_fn], and returned a Linear"),
        ("cli_broken:build", "SyntaxError"),
        ("hf:missing.json", "missing.json cannot be read: No such file"),
        ("hf:list.json", "list.json is no configuration: it has no model_type"),
        ("hf:cli_target.py", "is no JSON"),
        ("hf:llama.json,rows=x", "'rows=x' is neither rows=NUMBER nor sequence=NUMBER"),
    ],
)
def test_a_bad_target_is_one_message(target: str, text: str) -> None:
    done = _run("verify", target, "--mesh", "dp=2")
    assert done.exit_code == 2 and text in done.stderr and done.stderr.count("\n") == 1
    assert "noise" in done.stdout or not done.stdout


@pytest.mark.slow
def test_a_configuration_is_a_target() -> None:
    found = _document("simulate", "hf:llama.json,rows=4,sequence=16", "--mesh", "dp=2,tp=2")
    assert found["ranks"] == 4
    done = _run("verify", "hf:llama.json,rows=4,sequence=16", "--mesh", "tp=2")
    assert done.exit_code == 4 and "QN604" in done.stderr


def test_every_verb_that_takes_a_plan_takes_its_decisions() -> None:
    options = {name: {one.name for one in loaded(name).params} for name in VERBS}
    assert [name for name, known in options.items() if ("plan" in known) != ("settings" in known)] == ["train"]
    assert "settings" in options["train"]
    found = _document("simulate", *PLAIN, "--set", "schedule=gpipe", "--set", "zero=0")
    assert found["schedule"] == "gpipe"
    found = _document("simulate", *PLAIN, "--set", "zero=7", code=answer.USAGE)
    assert "zero=7: zero is one of 0, 1, 2, 3" in found["error"]["message"]


def test_exit_codes() -> None:
    assert _run("verify", "cli_target:build").exit_code == answer.USAGE  # no mesh
    assert _run("verify", *PLAIN, "--limit", "1e-12").exit_code == answer.NOT_EQUAL
    found = _document("verify", "cli_target:clamped", "--mesh", "dp=2", code=answer.UNSUPPORTED)
    assert found["error"]["id"] == "QN110" and found["error"]["fix"]
    found = _document("plan", "cli_target:huge", "--nodes", "1", "--gpus-per-node", "1", code=answer.NO_PLAN)
    assert found["error"]["id"] == "QN212"
    assert _run("plan", "cli_target:build", "--gpu", "abacus").exit_code == answer.UNSUPPORTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CompileError("QN203", ""), 4), (InputError("QN106", ""), 4), (CompileError("QN212", ""), 3),
        (RunError("QN302", ""), 6), (RunError("QN401", ""), 6), (RunError("QN501", ""), 8),
        (CheckpointError("QN601", ""), 7), (CompileError("QN604", ""), 4), (CompileError("QN301", ""), 4),
    ],
)  # fmt: skip
def test_every_kind_of_error_has_its_exit_code(error: QuintNetError, code: int) -> None:
    assert answer.exit_code(error) == code
    table = (ROOT / "docs/cli.md").read_text()
    assert f"\n| {code} |" in table


def test_every_verb_has_an_example_that_is_in_the_docs() -> None:
    table = (ROOT / "docs/cli.md").read_text()
    for name in (
        "plan",
        "explain",
        "estimate",
        "simulate",
        "passes",
        "dump",
        "diff",
        "verify",
        "train",
        "doctor",
        "calibrate",
    ):
        said = _run(name, "--help").stdout
        assert f"Example: quintnet {name}" in said and "--json" in said
        assert f"`{name}`" in table


OUTPUTS = {
    "simulate": ("--html", "--trace"), "measure": ("--out", "--html"), "plan": ("--out",), "calibrate": ("--out",),
    "dump": ("--out",), "watch": ("--out",),
}  # fmt: skip
WRITTEN_OPTIONS = [(verb, option) for verb, options in OUTPUTS.items() for option in options]
READ_OPTIONS = {"plan", "calibration", "measured", "config"}


def test_every_option_that_is_a_path_is_known() -> None:
    """One that is new is read, or is in ``OUTPUTS``, whose errors are tested."""
    for name in VERBS:
        hints = get_type_hints(getattr(importlib.import_module(f"quintnet_compiler.cli.{name}"), name))
        paths = {option for option, kind in hints.items() if kind == Path | None or (kind is Path and option == "out")}
        assert {f"--{option}" for option in paths - READ_OPTIONS} == set(OUTPUTS.get(name, ())), name


@pytest.mark.parametrize(("verb", "option"), WRITTEN_OPTIONS)
def test_a_file_that_cannot_be_written_is_one_message(
    verb: str, option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".temporary")

    def launch(*_: object) -> list[Any]:
        batch = torch.ones(2, 4), torch.ones(2, 4)
        program = quintnet.compile(torch.nn.Linear(4, 4), quintnet.Mesh(dp=1), batch, loss_fn=F.mse_loss, check="off")
        return [program.simulate()]

    monkeypatch.setattr("quintnet_compiler.runtime.launch.launch.launch", launch)
    calibration = types.SimpleNamespace(save=lambda path: save_text(path, ""))
    monkeypatch.setattr("quintnet_compiler.reports.calibrate.calibrate", lambda *_: calibration)
    monkeypatch.setattr("os.replace", full)
    arguments = {
        "watch": (str(folder), "--once"),
        "calibrate": (),
        "plan": ("cli_target:build", "--gpus-per-node", "1"),
    }
    done = _run(verb, *arguments.get(verb, PLAIN), option, "written")
    path = "written/plan.json" if verb == "dump" else "written"
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    message = f"quintnet {verb}: Invalid value for {option}: {path} cannot be written: No space left on device"
    assert message in done.stderr and ".temporary" not in done.stderr
    assert not list(folder.glob("*.tmp"))


def test_an_answer_that_cannot_be_written_is_one_message() -> None:
    """And what is left in a buffer does not fail at the end of the process."""
    command = [sys.executable, "-m", "quintnet_compiler.cli", "explain", "QN203"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == "quintnet explain: Invalid value for stdout: stdout cannot be written: No space left on device\n"
    )


def test_no_colour_reaches_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for done in (_run("--help"), _run("simulate", *PLAIN), _run("verify", "cli_target:one", "--mesh", "dp=2")):
        assert "\x1b[" not in done.output


def test_errors_are_explained() -> None:
    for code in ERRORS:
        found = error_help(code)
        assert isinstance(found, ErrorHelp) and found.why.endswith(".") and found.fix.endswith(".")
    assert _document("explain", "qn203")["summary"] == ERRORS["QN203"].summary
    done = _run("explain", "QN230")
    assert done.exit_code == 2 and "QN203" in done.stderr
    assert "NAME" in _run("explain", "cli_target:build").stderr


def test_another_way_is_explained() -> None:
    found = _document("explain", "cli_target:build", "0.weight", "--mesh", "tp=2", "--why-not", '{"tp": "S(1)"}')
    assert found["otherwise"]["parameters"]["0.weight"][1] == "tp: S(1)"
    assert _run("explain", "cli_target:build", "0", "--mesh", "tp=2", "--why-not", "{1}").exit_code == 2


@pytest.mark.slow
def test_plans_and_dumps_are_compared(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    made = _document("dump", *PLAIN, "--out", one)
    assert "index.html" in made["files"] and (tmp_path / "one/index.html").is_file()
    assert _run("dump", "cli_target:build", "--mesh", "pp=2,dp=2", "--out", two).exit_code == 0
    assert _document("diff", one, one)["equal"]
    found = _document("diff", one, two)
    assert found["plan"]["mesh"] == [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
    assert found["files"]["ranks/rank000.py"]["added"] > 0 and "passes/01_Normalize.txt" not in found["files"]
    plans = _document("diff", f"{one}/plan.json", f"{two}/plan.json")
    assert plans["plan"] == found["plan"] and plans["parameters"] == found["parameters"] and not plans["files"]
    assert "mesh:" in _run("diff", one, two).stdout
    for bad in ((one, f"{two}/plan.json"), (one, "missing"), (one, str(tmp_path))):
        assert _run("diff", *bad).exit_code == 2


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _document("doctor")
    assert found["ok"] and "gloo" in found["backends"] and found["packages"]["torch"] and "lo" in found["interfaces"]

    def fails(*_: object, **__: object) -> None:
        raise RunError("QN302", "rank 1 ended with exit code -9")

    monkeypatch.setattr(examining, "launch", fails)
    done = _run("doctor")
    assert done.exit_code == answer.RANK_FAULT and "FAIL: rank 1 ended with exit code -9" in done.stdout


def test_quiet_and_verbose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*_: object, **__: object) -> None:
        warnings.warn(FaultWarning("rank 1 is gone"), stacklevel=2)
        raise RunError("QN302", "rank 1 ended")

    monkeypatch.setattr(examining, "launch", warns)
    loud, quiet = _run("doctor"), _run("-q", "doctor")
    assert "\nwarning: rank 1 is gone\n" in f"\n{loud.stderr}" and "warnings.warn" not in loud.stderr
    assert not quiet.stderr and "FAIL: rank 1 ended" in quiet.stdout
    told = ("explain", "cli_target:build", "nowhere", "--mesh", "dp=1")
    assert "Traceback" not in _run(*told).stderr and "Traceback" in _run("-v", *told).stderr
    assert "QN204" in _run("-v", *told).stderr


def test_help_lists_all_verbs_and_loads_none() -> None:
    code = (
        "import sys; from quintnet_compiler.cli import main; sys.argv = ['quintnet', '--help']\n"
        "try: main()\nexcept SystemExit: print([name for name in ('torch', 'numpy', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    for name, line in VERBS.items():
        assert name in done.stdout and line.split()[0] in done.stdout
        assert callable(getattr(importlib.import_module(f"quintnet_compiler.cli.{name}"), name))


def test_names_are_imported_when_they_are_used() -> None:
    code = "import sys, quintnet; assert 'torch' not in sys.modules; quintnet.Mesh(dp=2); print(len(dir(quintnet)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) == len(quintnet.__all__)
    assert all(getattr(quintnet, name) is not None for name in quintnet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'compiler'"):
        _ = quintnet.compiler
