"""What programs leave behind in a process: what docs/process.md says, and nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize
import scipy.sparse
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.driver import pipeline
from quintnet_compiler.runtime.backends import backends
from quintnet_compiler.runtime.transport import gloo_threads

from .process_state import changes, process_state

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = scipy.optimize, scipy.sparse, torch.distributed.tensor, torch.distributed.checkpoint  # set things of theirs


class Undecided(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 8))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randn(8, 8)


def _refused(model: nn.Module, batch: Any) -> None:
    with pytest.raises(quintnet.CompileError):
        quintnet.compile(model, Mesh(tp=2), batch, loss_fn=F.mse_loss)


def _failing(program: quintnet.CompiledProgram) -> None:
    with pytest.raises(quintnet.CompileError):
        program.step((torch.zeros(8, 7), torch.zeros(8, 8)))


@pytest.mark.slow
def test_nothing_is_left_behind_but_what_is_documented(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[None] = []
    monkeypatch.setattr(backends, "tune_malloc", lambda: tuned.append(None))  # nobody can ask malloc
    model, undecided, batch = _model(), Undecided(8, 8), _batch()
    torch.export.export(_model(), (batch[0],), strict=False)  # what torch sets at its first export
    torch.optim.SGD(model.parameters())  # and at its first optimizer
    cluster = quintnet.Cluster("h100", nodes=1, gpus_per_node=2)
    made: list[quintnet.CompiledProgram] = []
    stages: dict[str, Callable[[], object]] = {
        "compile": lambda: made.append(
            quintnet.compile(model, Mesh(pp=2, tp=2), batch, loss_fn=F.mse_loss, microbatches=2)
        ),
        "a step": lambda: made[0].step(batch),
        "evaluate": lambda: made[0].evaluate(batch),
        "outputs": lambda: made[0](batch[0]),
        "a step that fails": lambda: _failing(made[0]),
        "a compile that fails": lambda: _refused(undecided, batch),
        "verify": lambda: made[0].verify(),
        "simulate": lambda: made[0].simulate(),
        "explain": lambda: made[0].explain("0"),
        "save": lambda: made[0].save(tmp_path, step=1),
        "load": lambda: made[0].load(tmp_path),
        "plan": lambda: quintnet.plan(model, cluster, batch, loss_fn=F.mse_loss, progress=False),
        "close": lambda: made[0].close(),
    }
    before = process_state()
    for name, stage in stages.items():
        stage()
        after = process_state()
        assert changes(before, after) == [], name
        before = after
    assert len(tuned) == 1


def test_a_process_that_is_not_to_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "tune_malloc", lambda: pytest.fail("malloc was tuned"))
    batch = _batch()
    quintnet.compile(_model(), Mesh(dp=2), batch, loss_fn=F.mse_loss, tune_process=False).step(batch)


class Talking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        print("printed by the model")
        logging.getLogger("of_the_model").warning("logged by the model")
        warnings.warn("warned of by the model", stacklevel=1)
        return super().forward(x)


def test_what_a_model_says_is_heard(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="warned of by the model"):
        quintnet.compile(Talking(8, 8), Mesh(tp=2), _batch(), loss_fn=F.mse_loss, check="off")
    assert "logged by the model" in caplog.text and "printed by the model" in capsys.readouterr().out


def test_torch_is_not_heard_where_an_error_says_more(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(Undecided(8, 8), _batch())
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == [] and capsys.readouterr() == ("", "")


def test_torch_is_not_heard_where_a_check_tries_what_it_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(pipeline, "check_types", lambda *_: tried.error("failed while attempting to run meta"))
    quintnet.compile(_model(), Mesh(tp=2), _batch(), loss_fn=F.mse_loss)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_threads_compile_at_once() -> None:
    """Each puts back what was there before, and the programs are those of one thread."""
    before, batch = process_state(), _batch()
    torch.manual_seed(0)
    models = [_model() for _ in range(2)]
    made: dict[int, Tensor] = {}

    def compile_one(number: int) -> None:
        made[number] = quintnet.compile(models[number], Mesh(tp=2), batch, loss_fn=F.mse_loss).step(batch)

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = process_state()
    before["random of torch"] = state["random of torch"]  # of the models
    assert changes(before, state) == []
    torch.manual_seed(0)
    alone = [quintnet.compile(_model(), Mesh(tp=2), batch, loss_fn=F.mse_loss).step(batch) for _ in range(2)]
    torch.testing.assert_close([made[0], made[1]], alone)


@pytest.mark.slow
def test_importing_changes_nothing() -> None:
    code = """
import sys
import quintnet
assert "torch" not in sys.modules
for name in list(sys.modules):
    if name.partition(".")[0] in ("quintnet", "quintnet_compiler"):
        del sys.modules[name]
import scipy.optimize, scipy.sparse, torch.distributed.checkpoint, torch.distributed.tensor
torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2, 2),), strict=False)
from tests.process_state import changes, process_state
before = process_state()
import quintnet
for name in quintnet.__all__:
    getattr(quintnet, name)
print(changes(before, process_state()))
"""
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert made.stdout == "[]\n"


def _policies() -> set[int]:
    """Of gloo's threads in this process."""
    tasks = [
        task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == gloo_threads.NAME
    ]
    return {os.sched_getscheduler(int(task.name)) for task in tasks}


def _rank() -> tuple[list[str], set[int], set[int]]:
    """What two programs change in a rank's process, and gloo's policies after each."""
    batch = torch.ones(8, 8), torch.ones(8, 8)
    torch.export.export(_model(), (batch[0],), strict=False)
    torch.manual_seed(0)
    model = _model()
    before, policies = process_state(), []
    for tune in (False, True):
        program = quintnet.compile(model, Mesh(dp=2), batch, loss_fn=F.mse_loss, tune_process=tune)
        program.step(batch)
        program.close()
        policies.append(_policies())
    return changes(before, process_state()), *policies


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are named in /proc")
def test_what_a_rank_changes() -> None:
    for found, untuned, tuned in quintnet.launch(_rank, 2, timeout=120):
        assert found == []
        assert os.SCHED_BATCH not in untuned and tuned <= {os.SCHED_BATCH}
    assert os.environ.get("RANK") is None and not torch.distributed.is_initialized()
