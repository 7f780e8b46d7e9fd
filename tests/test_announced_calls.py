"""Ranks that are in different calls, or have finished, are named with both calls and both lines, and soon."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

HERE = r"\S*test_announced_calls\.py:\d+"


def _batch() -> tuple[Tensor, Tensor]:
    return torch.ones(12, 8), torch.zeros(12, 4)


def _apart(what: str, odd: int, folder: Path) -> None:
    """Two steps on every rank; then one rank makes a call that the others do not make, or none at all."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    other = copy.deepcopy(model)
    mesh = quintnet.Mesh(dp=dist.get_world_size())
    program = quintnet.compile(model, mesh, _batch(), loss_fn=F.mse_loss)
    twin = quintnet.compile(other, mesh, _batch(), loss_fn=F.mse_loss) if "program 2" in what else program
    whole = program.optimizer(lambda p: torch.optim.SGD(p, lr=0.1)) if what == "optimizer.step" else None
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: program.save(folder, step=2),
        "save_async": lambda: program.save_async(folder, step=2),
        "save_pretrained": lambda: program.save_pretrained(folder / "hf"),
        "load": lambda: program.load(folder),
        "initialize": lambda: program.initialize(),
        "clip_grad_norm": lambda: program.clip_grad_norm(1.0),
        "evaluate": lambda: program.evaluate(_batch()),
        "program(...)": lambda: program(_batch()[0]),
        "measure": lambda: program.measure(_batch()),
        "verify": lambda: program.verify(_batch()),
        "optimizer.step": lambda: whole and whole.step(),
        "step 2 of program 2": lambda: twin.step(_batch()),
        "barrier": lambda: dist.barrier(),
    }
    for _ in range(2):
        program.step(_batch())
        program.clip_grad_norm(1.0)
        program.zero_grad()
        if twin is not program:
            twin.step(_batch())
    if dist.get_rank() == odd:
        (folder / "when").write_text(str(time.monotonic()))
        if what == "finished":
            return
        calls[what]()
    program.step(_batch())
    time.sleep(20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "ranks", "odd"),
    [
        ("save", 3, 1),
        ("clip_grad_norm", 2, 0),
        ("program(...)", 2, 0),
        ("save", 2, 0),
        ("save_async", 2, 1),
        ("save_pretrained", 2, 0),
        ("load", 2, 1),
        ("initialize", 2, 0),
        ("evaluate", 2, 1),
        ("measure", 2, 0),
        ("verify", 2, 0),
        ("optimizer.step", 2, 1),
        ("step 2 of program 2", 2, 1),
    ],
)
def test_a_call_that_one_rank_makes_alone(what: str, ranks: int, odd: int, tmp_path: Path) -> None:
    with pytest.raises(quintnet.RunError) as caught:
        quintnet.launch(_apart, ranks, (what, odd, tmp_path))
    took = time.monotonic() - float((tmp_path / "when").read_text())
    text = str(caught.value)
    others = [rank for rank in range(ranks) if rank != odd]
    named = f"ranks {', '.join(map(str, others))} are" if len(others) > 1 else f"rank {others[0]} is"
    assert caught.value.code == "QN401" and took < 5, text
    assert len(re.findall(rf"rank {odd} is in {re.escape(what)} at {HERE}", text)) == 1, text
    assert len(re.findall(rf"{named} in step 2 at {HERE}", text)) == 1 and "SIG" not in text, text


@pytest.mark.slow
def test_a_rank_that_finished_first_is_said_to_have_finished(tmp_path: Path) -> None:
    with pytest.raises(quintnet.RunError) as caught:
        quintnet.launch(_apart, 2, ("finished", 1, tmp_path))
    took = time.monotonic() - float((tmp_path / "when").read_text())
    assert caught.value.code == "QN402" and took < 5
    assert re.search(rf"rank 1 has finished after step 1; rank 0 is in step 2 at {HERE}", str(caught.value))


@pytest.mark.slow
def test_communication_of_the_users_own_is_named_by_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(quintnet.RunError) as caught:
        quintnet.launch(_apart, 2, ("barrier", 0, tmp_path), collective_timeout=8)
    told = re.findall(
        rf"all ranks have been waiting for 3 s: rank 0 is at {HERE} in <lambda>, after", capfd.readouterr().err
    )
    assert len(told) == 1
    text = str(caught.value)
    assert caught.value.code == "QN402" and re.search(rf"rank 0 is at {HERE} in <lambda>, after clip_grad_norm", text)
    assert re.search(rf"rank 1 is in step 2 at {HERE}", text), text


def _local_rows_of_one(what: str) -> str:
    """Rank 1 alone gives its rows, or is in evaluation mode."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    program = quintnet.compile(model, quintnet.Mesh(dp=2), _batch(), loss_fn=F.mse_loss, check="off", zero=3)
    program.step(_batch())
    if what == "mode":
        model.train(dist.get_rank() == 0)
    with pytest.raises(quintnet.InputError) as caught:
        program.step(_batch(), batch_is_local=what == "rows" and dist.get_rank() == 1)
    return str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("rows", r"ranks were given different batches\n  rank 1: \{batch of this data rank: \(float32\[12, 8\], "),
        ("mode", r"modules of ranks were changed in different ways\n  rank 1: .*changes of the module: 1\.training"),
    ],
)
def test_a_rank_that_is_given_other_rows_or_another_mode_is_told_which(what: str, says: str) -> None:
    for text in quintnet.launch(_local_rows_of_one, 2, (what,), timeout=120):
        assert re.search(says, text), text


def _one_fails(what: str) -> None:
    if dist.get_rank() == 1:
        if what == "long":
            raise ValueError("x" * 30_000_000)
        quintnet.compile(3, quintnet.Mesh(dp=2))  # type: ignore[arg-type]
    time.sleep(20)


def test_an_error_of_one_rank_names_it() -> None:
    with pytest.raises(quintnet.CompileError) as caught:
        quintnet.launch(_one_fails, 2, ("compile",))
    text = str(caught.value)
    assert caught.value.code == "QN105" and "a int is not a model" in text
    assert re.search(rf"\n  raised on rank 1; rank 0 is at (its start|{HERE} in (_one_fails|<module>))\n", text), text


def test_an_error_too_long_for_the_store_is_cut() -> None:
    start = time.monotonic()
    with pytest.raises(quintnet.RunError, match=r"QN302 (.|\n)*rank 1 raised ValueError: x+ \.\.\. \(\d+ characters"):
        quintnet.launch(_one_fails, 2, ("long",))
    assert time.monotonic() - start < 30
