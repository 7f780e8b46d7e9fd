"""After a fault, a rank that is left saves what it has in memory: the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet

Result = tuple[list[float], int | None, list[torch.Tensor]]


def _train(folder: Path, victim: int, when: int, delay: float, mesh: dict[str, int], plan: dict[str, Any]) -> Result:
    """Losses, the step that the run went on from, weights and statistics in the end. The only checkpoints are the last
    one and those of a fault."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 16, generator=generator), torch.randint(8, (48,), generator=generator))
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8)]
    program = quintnet.compile(
        nn.Sequential(*layers), quintnet.Mesh(**mesh), data[:12], loss_fn=F.cross_entropy, plan=plan, check="off"
    )
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    trainer = quintnet.Trainer(
        program,
        optimizer,
        DataLoader(data, batch_sampler=quintnet.BatchSampler(48, 12, seed=3)),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
        epochs=9,
        max_steps=8,
        checkpoint_folder=folder / "checkpoints",
        save_every=1000,
        console=False,
        log_every=0,
    )
    step = program.step

    def struck(*args: Any, **options: Any) -> torch.Tensor:
        if trainer.history.step == when and dist.get_rank() == victim and not (folder / "struck").exists():
            (folder / "struck").touch()
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            threading.Timer(delay, kill).start() if delay else kill()
        return step(*args, **options)

    program.step = struck  # type: ignore[method-assign]
    history = trainer.fit()
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in program.state_dict().items()}
    return history.losses, history.resumed_from, [whole[name].clone() for name in sorted(whole)]


def _both(
    folder: Path, victim: int, when: int, delay: float, mesh: dict[str, int], plan: dict[str, Any]
) -> tuple[int | None, str]:
    """Require that the run with a fault ends as the one without; the step that it went on from, and what was told."""
    ranks = quintnet.Mesh(**mesh).size
    (folder / "whole").mkdir(exist_ok=True)
    (folder / f"cut{when}").mkdir()
    if not (folder / "expected").exists():
        torch.save(quintnet.launch(_train, ranks, (folder / "whole", -1, 0, 0.0, mesh, plan)), folder / "expected")
    expected: list[Result] = torch.load(folder / "expected")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", quintnet.FaultWarning)
        arguments = (folder / f"cut{when}", victim, when, delay, mesh, plan)
        found = quintnet.launch(_train, ranks, arguments, restarts=2)
    resumed = found[0][1]
    for (losses, _, values), (later, _, others) in zip(expected, found, strict=True):
        assert losses[resumed or 0 :] == later
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
    return resumed, "\n".join(str(one.message) for one in told)


def test_the_other_replica_saves_its_step(tmp_path: Path) -> None:
    """Of the rank that held the checkpoints' lock, too."""
    resumed, told = _both(tmp_path, 0, 3, 0.0, {"dp": 2}, {})
    assert resumed == 3 and "restart 1 of 2, with 2 ranks; rank 1 saved step 3 after the fault" in told


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "plan"), [({"dp": 2}, {"zero": 1}), ({"tp": 2}, {})])
def test_what_has_no_replica_goes_on_from_a_checkpoint(
    mesh: dict[str, int], plan: dict[str, Any], tmp_path: Path
) -> None:
    resumed, told = _both(tmp_path, 1, 3, 0.0, mesh, plan)
    assert resumed is None and "no rank saved anything after the fault" in told


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_moments(seed: int, tmp_path: Path) -> None:
    """Whether a rank was within a step or elsewhere: the end is that of the run without a fault."""
    dice = random.Random(seed)
    saved = []
    for when in range(1, 7):
        resumed, told = _both(tmp_path, dice.randrange(3), when, dice.uniform(0, 0.02), {"dp": 3}, {})
        assert ("saved step" in told) == (resumed is not None) and resumed in (None, when, when + 1, when + 2)
        saved.append(resumed)
    print(f"went on from {saved}")
    assert any(step is not None for step in saved)
