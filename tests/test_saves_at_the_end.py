"""Saves that are under way when a job, a process or a program ends; and those that failed, of which nobody asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.checkpoint import background, staging
from quintnet_compiler.checkpoint.training_state import Destination, Snapshot, write

WIDE = 50_000


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 16, generator=generator), torch.arange(8) % 4


def _program(mesh: quintnet.Mesh, wide: int = 8) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, wide), nn.Linear(wide, 4))
    return quintnet.compile(model, mesh, _batch(), loss_fn=F.cross_entropy, check="off")


def _saves_last(folder: str, how: str) -> str:
    program = _program(quintnet.Mesh(dp=2), WIDE)
    program.step(_batch())
    program.save_async(folder, step=1)
    if how == "raise" and torch.distributed.get_rank() == 1:
        raise ValueError("after save_async")
    if how == "exit":
        sys.exit(0)
    return how


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["return", pytest.param("raise", marks=pytest.mark.slow), "exit"])
def test_a_job_ends_when_its_last_save_is_on_disk(how: str, tmp_path: Path) -> None:
    if how == "return":
        assert quintnet.launch(_saves_last, 2, (str(tmp_path), how), timeout=240) == ["return"] * 2
    else:
        with pytest.raises(quintnet.RunError, match="after save_async" if how == "raise" else "SystemExit"):
            quintnet.launch(_saves_last, 2, (str(tmp_path), how), timeout=240)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".writer") == ["step-00000001"]
    assert _program(quintnet.Mesh(dp=1), WIDE).load(tmp_path).step == 1


def _save_fails(folder: str, asks: bool) -> str:
    """Whether the job asks its last future, which has failed."""
    program = _program(quintnet.Mesh(dp=2))
    saving = program.save_async(folder, step=1)
    if asks:
        assert saving.exception(120) is not None
    return "the end"


def test_a_job_whose_last_save_failed_has_failed_unless_it_asked(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    with pytest.raises(quintnet.CheckpointError, match="step-00000001 was not written: save_async failed") as caught:
        quintnet.launch(_save_fails, 2, (str(file), False), timeout=240)
    assert caught.value.code == "QN603" and str(file) in caught.value.message
    assert quintnet.launch(_save_fails, 2, (str(file), True), timeout=240) == ["the end"] * 2


SCRIPT = f"""
import os, sys
import torch
import quintnet
from tests.test_saves_at_the_end import _batch, _program

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    program = _program(quintnet.Mesh(dp=int(os.environ.get("WORLD_SIZE", "1"))), {WIDE})
    program.step(_batch())
    program.save_async(folder, step=1)
    if how == "raise":
        raise ValueError("after save_async")
"""


def _script(folder: Path, how: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    (script := folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *prefix, str(script), str(folder / "run"), how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("prefix", [(), pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["alone", "torchrun"])
def test_the_interpreter_waits_for_a_save(prefix: tuple[str, ...], tmp_path: Path) -> None:
    done = _script(tmp_path, "return", *prefix)
    assert done.returncode == 0, done.stderr
    assert _program(quintnet.Mesh(dp=1), WIDE).load(tmp_path / "run").step == 1


@pytest.mark.slow
def test_the_interpreter_waits_for_a_save_after_an_exception(tmp_path: Path) -> None:
    assert "ValueError: after save_async" in _script(tmp_path, "raise").stderr
    assert _program(quintnet.Mesh(dp=1), WIDE).load(tmp_path / "run").step == 1


@pytest.mark.slow
def test_the_interpreter_tells_of_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    said = _script(tmp_path, "return").stderr
    assert "CheckpointWarning: QN603" in said and "run: step-00000001 was not written: save_async failed" in said


HOOK = """
import atexit, sys, threading
from concurrent.futures import ThreadPoolExecutor
from quintnet_compiler.compat.interpreter import run_before_exit

if sys.argv[1] == "no hook":
    del threading._register_atexit
pool = ThreadPoolExecutor(1)

def end():
    try:
        print("pool:", pool.submit(lambda: "works").result())
    except RuntimeError:
        print("pool: refuses")

atexit.register(lambda: print("late:", run_before_exit(print)))
print("early:", run_before_exit(end))
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("hook", ["early: True", "pool: works", "late: False"]),
        ("no hook", ["early: True", "pool: refuses", "late: True"]),
    ],
)
def test_a_hook_runs_before_thread_pools_refuse_work(how: str, expected: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK, how],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines() == expected


AT_EXIT = f"""
import atexit, concurrent.futures.thread, sys, threading
import quintnet
from tests.test_saves_at_the_end import _program

folder, how = sys.argv[1:]
if "no hook" in how:
    del threading._register_atexit
program = _program(quintnet.Mesh(dp=1), {WIDE})
if "before" in how:
    program.save_async(folder, step=1)
last = program.save if "save" in how else program.save_async
if "atexit" in how:
    atexit.register(last, folder, step=2)
else:
    last(folder, step=2)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "how", ["atexit", "before, atexit", "atexit, save", "before, no hook", "before, no hook, atexit"]
)
def test_a_save_that_begins_when_the_interpreter_ends_is_written(how: str, tmp_path: Path) -> None:
    """Also with a Python that lacks the private hook before thread pools refuse new work."""
    done = subprocess.run(
        [sys.executable, "-W", "error::quintnet.CheckpointWarning", "-c", AT_EXIT, str(tmp_path / "run"), how],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert _program(quintnet.Mesh(dp=1), WIDE).load(tmp_path / "run").step == 2


@pytest.mark.parametrize("told_by", ["save_async", "save", "close"])
def test_a_failure_nobody_asked_of_is_told_once(told_by: str, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    program = _program(quintnet.Mesh(dp=1))
    later = {
        "save_async": lambda: program.save_async(tmp_path / "run", step=2).result(),
        "save": lambda: program.save(tmp_path / "run", step=2),
        "close": program.close,
    }
    program.save_async(file, step=1)
    with pytest.warns(quintnet.CheckpointWarning, match="file: step-00000001 was not written: save_async failed"):
        later[told_by]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        later[told_by]()


def test_a_failure_that_was_asked_of_is_not_told_again(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    program = _program(quintnet.Mesh(dp=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ask in ("result", "exception"):
            saving = program.save_async(file, step=1)
            try:
                assert isinstance(getattr(saving, ask)(), quintnet.CheckpointError)
            except quintnet.CheckpointError:
                assert ask == "result"
        program.save(tmp_path / "run", step=2)
        program.close()


def test_a_save_is_given_up_by_name_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go_on = threading.Event()

    def slow(found: Snapshot, to: Destination, group: Any) -> Path | str:
        go_on.wait(120)
        return write(found, to, group)

    monkeypatch.setattr(background, "write", slow)
    monkeypatch.setattr(background, "PATIENCE", 0.1)
    program = _program(quintnet.Mesh(dp=1))
    saving = program.save_async(tmp_path, step=7)
    assert not saving.cancel()
    with pytest.raises(quintnet.CheckpointError, match=f"QN603(?s:.*){tmp_path}: step-00000007") as caught:
        program.close()
    assert "still writing" in caught.value.message
    go_on.set()
    assert Path(saving.result(120)).name == "step-00000007"
    program.close()


def test_a_forked_child_saves_with_a_thread_of_its_own(tmp_path: Path) -> None:
    program = _program(quintnet.Mesh(dp=1))
    program.save_async(tmp_path / "parent", step=1).result(120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        child = os.fork()
    if child == 0:
        try:
            program.save_async(tmp_path / "child", step=2).result(120)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert program.load(tmp_path / "child").step == 2


def test_a_save_is_written_at_once_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if self.name == "quintnet-save":
            raise RuntimeError("can't start new thread")
        start(self)

    program = _program(quintnet.Mesh(dp=1))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        saving = program.save_async(tmp_path, step=1)
        assert saving.done()
        assert Path(saving.result()).name == "step-00000001"
    program.save(tmp_path, step=2)
    program.close()


def _one_has_no_memory(folder: str) -> list[str]:
    """Save when a rank has no memory for its copy, and once more with other values; each one's path or error."""
    program, texts = _program(quintnet.Mesh(dp=2)), list[str]()
    room = staging._room

    def fails(size: int) -> Tensor:
        raise MemoryError(f"no {size} bytes")

    for step in (1, 2):
        with torch.no_grad():
            for parameter in program.parameters():
                parameter.fill_(step)
        staging._room = fails if step == 1 and torch.distributed.get_rank() == 1 else room
        try:
            texts.append(str(program.save_async(folder, step=step).result(120)))
        except quintnet.CheckpointError as error:
            texts.append(str(error))
    return texts


def test_a_rank_without_memory_for_its_copy_does_not_mix_two_saves(tmp_path: Path) -> None:
    for first, second in quintnet.launch(_one_has_no_memory, 2, (str(tmp_path),), timeout=240):
        assert "QN603" in first and "MemoryError: no" in first and "(rank 1)" in first
        assert second == str(tmp_path / "step-00000002")
    program = _program(quintnet.Mesh(dp=1))
    assert program.load(tmp_path).step == 2
    assert all(bool((parameter == 2).all()) for parameter in program.parameters())
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == ["step-00000002"]


def _leaves_first(folder: str) -> str:
    """Destroy the process group while a save is under way; the error of that."""
    program, go_on = _program(quintnet.Mesh(dp=2)), threading.Event()

    def slow(found: Snapshot, to: Destination, group: Any) -> Path | str:
        go_on.wait(120)
        return write(found, to, group)

    background.write = slow
    saving = program.save_async(folder, step=1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    go_on.set()
    error = str(saving.exception(120))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return error


def test_a_save_without_its_process_group_writes_nothing(tmp_path: Path) -> None:
    for error in quintnet.launch(_leaves_first, 2, (str(tmp_path),), timeout=240):
        assert "QN603" in error and "the process group was destroyed before save_async had ended" in error
    assert not list(tmp_path.glob("step-*"))
