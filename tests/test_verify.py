"""``verify`` says equal where programs are, and names the operator where a rule is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.ops.rules.notation import Rule

from .models import CASES, build

torch.set_num_threads(1)
aten = torch.ops.aten
ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_sixty_four_ranks_are_compared_with_the_module() -> None:
    case, model = CASES["vit"], build("vit")
    mesh = quintnet.Mesh(pp=4, dp=4, tp=4)
    program = quintnet.compile(model, mesh, case.batch(16), loss_fn=case.loss_fn, microbatches=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = program.verify()
    assert report.ok and report.ranks == 64 and report.worst.error < 1e-12
    kinds = {(c.what, c.step) for c in report.comparisons}
    assert kinds >= {("output", 0), *((what, step) for what in ("loss", "gradient", "parameter") for step in (0, 1))}
    assert {c.name for c in report.comparisons if c.what == "gradient"} == set(before)
    for name, parameter in model.named_parameters():  # nothing of the user's changed
        assert torch.equal(parameter, before[name]) and parameter.grad is None


@pytest.mark.slow
def test_float32_is_compared_in_float64_on_request() -> None:
    case, model = CASES["gpt"], build("gpt", torch.float32)
    program = quintnet.compile(model, quintnet.Mesh(dp=2, tp=2), case.batch(8))
    report, double = program.verify(), program.verify(float64=True)
    assert report.ok and report.dtype == "float32" and report.worst.error > 1e-9
    assert double.ok and double.dtype == "float64" and double.worst.error < 1e-12
    assert next(model.parameters()).dtype is torch.float32


def _along(node):  # type: ignore[no-untyped-def]
    """A softmax that pretends that any dim may be split."""
    return quintnet.rule(aten.softmax.int, "... -> ...").factors(node)


class Scaled(nn.Module):
    """A linear and an operator of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.softmax(self.up(x), -1))


@pytest.mark.parametrize(
    ("rule", "direction"),
    [
        (quintnet.rule(aten.linear.default, "... i, o i, o -> ... o"), "forward"),  # every rank adds the bias
        (Rule(aten.softmax.int, _along), "forward"),
    ],
    ids=["bias", "softmax"],
)
def test_a_wrong_rule_is_caught_in_one_run_and_named(rule: quintnet.Rule, direction: str) -> None:
    model = Scaled().double()
    batch = (torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 8, (8,)))
    plan = {"parameters": {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}}
    program = quintnet.compile(model, quintnet.Mesh(tp=2), batch, loss_fn=F.cross_entropy, plan=plan, rules=[rule])
    report = program.verify(steps=1)
    assert not report.ok
    assert report.culprit is not None
    assert report.culprit.operators == (str(rule.target),) and report.culprit.direction == direction
    text = str(report)
    assert "NOT EQUAL" in text and str(rule.target) in text and "test_verify.py" in text and "tp: " in text
    found = json.loads(report.to_json())
    assert not found["ok"] and found["culprit"]["operators"] == [str(rule.target)]


@torch.library.custom_op("quintnet_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _back(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum((0, 1)) / x.shape[0]  # a mean over the rows that it sees


scaled.register_autograd(_back, setup_context=_keep)


class Averaged(nn.Module):
    """An operator whose gradient depends on how many rows there are: its forward splits, its backward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(scaled(x, self.weight)).mean(1)


def test_a_rule_that_is_wrong_in_the_backward_only_is_named_too() -> None:
    rule = quintnet.rule(torch.ops.quintnet_tests.scaled.default, "... n, n -> ... n")
    batch = (torch.randn(8, 4, 16, dtype=torch.float64), torch.randint(0, 8, (8,)))
    program = quintnet.compile(Averaged().double(), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy, rules=[rule])
    report = program.verify(steps=1)
    assert not report.ok and report.culprit is not None
    assert report.culprit.direction == "backward"
    assert report.culprit.operators == ("quintnet_tests.scaled.default",)


class Masked(nn.Module):
    """Buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)
        self.register_buffer("mask", torch.arange(8) > 2)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        transposed = torch.view_as_complex(self.layer(x).view(-1, 4, 2)) * self.turns
        return torch.view_as_real(transposed).flatten(1) * self.mask * self.steps


def test_buffers_of_any_dtype_are_compared() -> None:
    batch = (torch.randn(8, 16), torch.randint(0, 8, (8,)))
    report = quintnet.compile(Masked(), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy).verify()
    assert report.ok and {c.name for c in report.comparisons if c.what == "buffer"} == {"mask", "turns", "steps"}


def test_report_is_readable_in_a_notebook() -> None:
    case = CASES["mlp"]
    report = quintnet.compile(build("mlp"), quintnet.Mesh(dp=2), case.batch(4), loss_fn=case.loss_fn).verify(steps=1)
    page = report._repr_html_()
    assert "<table>" in page and "ups.0.weight" in page and "equal" in page


def test_a_proof_follows_a_parameter_to_the_loss() -> None:
    case = CASES["gpt"]
    program = quintnet.compile(build("gpt"), quintnet.Mesh(pp=2, dp=2, tp=2), case.batch(8), microbatches=2)
    text = program.prove("blocks.1.down.weight")
    assert "dp: R, mb: R, tp: S(1)" in text and "one all-reduce at the end of the step" in text
    assert "reduce_scatter; its gradient: all_gather" in text and "quintnet.row_nll" in text
    tied = program.prove("wte.weight")
    assert "stages 0, 1 use it" in tied and "the sum of 2 terms" in tied
    with pytest.raises(quintnet.CompileError, match=r"QN204.*\n.*\n.*did you mean blocks.0.up.weight"):
        program.prove("blocks.0.up.weigth")


MODULE = """
import torch, torch.nn.functional as F
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
    return model, (torch.randn(8, 16), torch.randint(0, 8, (8,))), F.cross_entropy

class Logs(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last

def unsupported():
    return Logs(16, 8), (torch.randn(8, 16), torch.randint(0, 8, (8,))), F.cross_entropy
"""


def _quintnet(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "mymodel.py").write_text(MODULE)
    command = [sys.executable, "-c", "from quintnet_compiler.cli import main; main()", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=_environment())


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "", "NO_COLOR": "1"}


@pytest.mark.slow
def test_the_command_says_equal_with_its_exit_code(tmp_path: Path) -> None:
    done = _quintnet(tmp_path, "verify", "mymodel:build", "--mesh", "pp=2,dp=2", "--float64", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] and json.loads(done.stdout)["dtype"] == "float64"
    done = _quintnet(tmp_path, "verify", "mymodel:build", "--mesh", "dp=2", "--limit", "1e-12")
    assert done.returncode == 5 and "NOT EQUAL" in done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("mymodel:build", "--mesh", "dp2"), 2, "AXIS=SIZE"),
        (("mymodel:nothing", "--mesh", "dp=2"), 2, "cannot be loaded"),
        (("mymodel", "--mesh", "dp=2"), 2, "package.module:builder"),
        (("mymodel:unsupported", "--mesh", "dp=2"), 4, "QN110"),
        (("mymodel:build", "--mesh", "xp=2"), 4, "QN201"),
    ],
)
def test_the_command_refuses_with_one_message(tmp_path: Path, args: tuple[str, ...], code: int, text: str) -> None:
    done = _quintnet(tmp_path, "verify", *args)
    assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
