"""checkpoint.replica: what a rank may save alone, and when it has not all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.api import program_checkpoints
from quintnet_compiler.checkpoint import replica as module
from quintnet_compiler.checkpoint.parts import SavedPart
from quintnet_compiler.checkpoint.replica import replica
from quintnet_compiler.checkpoint.training_state import Snapshot
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.core.mesh import Mesh

BATCH = torch.randn(4, 6), torch.randn(4, 6)


def _trained(steps: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    program = quintnet.compile(model, Mesh(dp=1), BATCH, loss_fn=F.mse_loss, check="off")
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.1)
    for _ in range(steps):
        program.step(BATCH)
        optimizer.step()
    return program, optimizer


def test_a_rank_that_has_everything() -> None:
    program, optimizer = _trained()
    found = replica(program._pretrained(), optimizer, {"a": 1}, {})
    assert found is not None and found.note["extra"] == {"a": 1}
    assert {"model/0.weight", "model/1.running_mean", "optimizer/0.weight/exp_avg"} <= found.parts.keys()


def test_a_rank_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    program, optimizer = _trained()
    subject = program._pretrained()
    other = program.optimizer(lambda p: torch.optim.SGD(p, lr=0.1))
    assert replica(subject, other, {}, {}) is None  # its ranks divide the state
    assert replica(subject, optimizer, {"a": object()}, {}) is None  # a checkpoint cannot hold it
    optimizer.state.pop(next(program.parameters()))
    assert replica(subject, optimizer, {}, {}) is None  # of one parameter, the state is elsewhere
    whole = replica(subject, None, {}, {})
    assert whole is not None
    split = SavedPart(torch.Size([6, 6]), torch.zeros(3, 6), {torch.Size([0, 0]): torch.zeros(3, 6)})
    for parts in ({**whole.parts, "model/0.weight": split}, {"model/0.weight": whole.parts["model/0.weight"]}):
        monkeypatch.setattr(module, "snapshot_here", lambda *given, parts=parts: Snapshot(parts, {}))
        assert replica(subject, None, {}, {}) is None


@pytest.mark.slow
def test_a_program_is_rescued_only_right_after_a_step_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, optimizer = _trained()
    told: list[int] = []
    pulse = SimpleNamespace(chosen=lambda: True, saved=told.append)
    monkeypatch.setattr(program_checkpoints, "current", SimpleNamespace(get=lambda: pulse))
    before = [p.detach().clone() for p in program.parameters()]

    def interrupt(code: str) -> None:
        def run(*given: Any, **how: Any) -> None:
            raise RunError(code, "a rank is gone")

        with monkeypatch.context() as patch, pytest.raises(RunError):
            patch.setattr(program._backend, "run", run)
            program.step(BATCH)

    assert program.rescue(tmp_path, step=1, optimizer=optimizer) is None
    interrupt("QN501")
    assert program.rescue(tmp_path, step=1, optimizer=optimizer) is None
    interrupt("QN402")
    found = program.rescue(tmp_path, step=1, optimizer=optimizer)
    assert found == tmp_path / "step-00000001" and told == [1]
    program.evaluate(BATCH)
    assert program.rescue(tmp_path, step=1, optimizer=optimizer) is None
    program.step(BATCH)
    optimizer.step()
    assert program.load(tmp_path, optimizer=optimizer).step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, program.parameters(), strict=True))
    interrupt("QN402")
    monkeypatch.setattr(program_checkpoints, "group_accelerator", lambda: torch.device("cuda"))
    assert program.rescue(tmp_path, step=1, optimizer=optimizer) is None
