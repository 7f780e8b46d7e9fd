"""Ranks that die, stop, fail or are fed badly: named once, by their cause, and soon; and runs that go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import quintnet

from .models import CASES, build


def _once(folder: Path, rank: int | None = None) -> bool:
    """Whether this is the first call (on ``rank``) of all attempts."""
    if rank is not None and dist.get_rank() != rank:
        return False
    try:
        (folder / "done").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _until(what: str, folder: Path) -> None:
    """Train on two data ranks; in step 3 something happens to rank 1."""
    torch.set_num_threads(1)
    case = CASES["mlp"]
    program = quintnet.compile(
        build("mlp"), quintnet.Mesh(dp=dist.get_world_size()), case.batch(6), loss_fn=case.loss_fn
    )
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    for step in range(10**6):
        batch: Any = case.batch(6)
        if step == 3 and dist.get_rank() == 1:
            program.step(batch)
            (folder / "when").write_text(str(time.monotonic()))
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "raise":
                raise ValueError("told to fail")
            if what == "hang":
                time.sleep(60)
            batch = {"none": None, "dtype": (batch[0].double().float(), batch[1])}.get(what, case.batch(12))
        try:
            program.step(batch)
        except quintnet.QuintNetError as error:
            since = time.monotonic() - float((folder / "when").read_text())
            (folder / f"heard{dist.get_rank()}").write_text(f"{since} {error}")
            raise


def _gone(folder: Path) -> bool:
    return not any(Path(f"/proc/{one.read_text()}").exists() for one in folder.glob("pid*"))


@pytest.mark.parametrize(
    ("what", "seconds", "code", "says"),
    [
        ("kill", 2, "QN302", "rank 1 was killed by SIGKILL in step 3"),
        ("stop", 3, "QN303", "rank 1 is stopped (SIGSTOP) in step 3"),
        ("raise", 2, "QN302", "rank 1 raised ValueError: told to fail"),
        ("hang", 6, "QN402", "rank 1 did not come in step 3"),
    ],
)
def test_a_fault_is_named_once_and_soon(what: str, seconds: float, code: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(quintnet.RunError) as caught:
        quintnet.launch(_until, 3, (what, tmp_path), collective_timeout=3 if what == "hang" else 600)
    since = time.monotonic() - float((tmp_path / "when").read_text())
    text = str(caught.value)
    assert caught.value.code == code and text.count(says) == 1, text
    assert text.count("\n  rank 0: ") <= 1 and text.count("Traceback") == (what == "raise"), text
    assert ("told to fail" in text) == (what == "raise") and ("test_faults.py" in text) == (what in ("raise", "hang"))
    assert since < seconds and _gone(tmp_path)
    print(what, since, text)


@pytest.mark.parametrize("what", ["shape", "none"])
def test_a_bad_batch_on_one_rank_is_the_same_error_on_all(what: str, tmp_path: Path) -> None:
    with pytest.raises(quintnet.InputError, match=r"(?s)QN102.*rank 1: .*all others: \(float64\[6, 16\]") as caught:
        quintnet.launch(_until, 3, (what, tmp_path))
    for rank in range(3):
        since, _, text = (tmp_path / f"heard{rank}").read_text().partition(" ")
        assert text == str(caught.value) and float(since) < 1, (rank, since, text)
        print(since, text)


def _resumed(folder: Path, what: str, steps: int) -> tuple[list[float], int | None, list[torch.Tensor]]:
    """A training run that goes on from its checkpoints; what it did, and the weights in the end."""
    torch.set_num_threads(1)
    mesh = {"dp": dist.get_world_size()} if dist.is_initialized() else {"dp": 2}
    trainer = _trainer(mesh, checkpoint_folder=folder, save_every=1, keep=2, epochs=9, max_steps=steps, console=False)
    step = trainer.program.step

    def faulty(*args: Any, **options: Any) -> torch.Tensor:
        if what == "kill" and trainer.history.step == 3 and _once(folder, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "gone" and trainer.history.step >= 3 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **options)

    trainer.program.step = faulty  # type: ignore[method-assign]
    history = trainer.fit()
    return history.losses, history.resumed_from, _weights(trainer)


def test_a_run_goes_on_after_a_restart_bit_by_bit(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = quintnet.launch(_resumed, 2, (tmp_path / "whole", "nothing", 6))
    with pytest.warns(quintnet.FaultWarning, match=r"(?s)rank 1 was killed by SIGKILL.*restart 1 of 2, with 2 ranks"):
        found = quintnet.launch(_resumed, 2, (tmp_path / "cut", "kill", 6), restarts=2)
    for (losses, _, weights), (later, resumed, others) in zip(whole, found, strict=True):
        assert resumed is not None and losses[resumed:] == later
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_rank_that_cannot_come_back_is_left_out(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    losses, _, weights = _resumed(tmp_path / "whole", "nothing", 6)
    with pytest.warns(quintnet.FaultWarning, match=r"(?s)rank 2 was killed by SIGKILL.*restart 2 of 2, with 3 ranks"):
        found = quintnet.launch(_resumed, 4, (tmp_path / "cut", "gone", 6), restarts=2, fewest=2)
    assert len(found) == 3
