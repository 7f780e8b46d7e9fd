"""Ranks that die, stop, fail or are fed badly: named once, by their cause, and soon; and runs that go on."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.runtime.launch import faults
from quintnet_compiler.runtime.launch.calls import frequent

from .models import CASES, MLP, build


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
    """Whether every rank has ended (nobody may have asked how, where its parent has died)."""

    def state(pid: str) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "Z"

    return all(state(one.read_text()) == "Z" for one in folder.glob("pid*"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "seconds", "code", "says"),
    [
        ("kill", 2, "QN302", "rank 1 was killed by SIGKILL in step 3"),
        ("stop", 3, "QN303", "rank 1 is stopped (SIGSTOP) in step 3"),
        ("raise", 2, "QN302", "rank 1 raised ValueError: told to fail"),
        pytest.param("hang", 6, "QN402", "rank 1 did not come in step 3", marks=pytest.mark.slow),
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


_HOLDS_A_RANK = """
import ctypes, os, sys, time
pid, folder = int(sys.argv[1]), sys.argv[2]
seize, detach, wall = 0x4206, 17, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
refused = libc.ptrace(seize, pid, 0, 0) or libc.ptrace(0x4207, pid, 0, 0)
if not refused:
    os.waitpid(pid, wall)
open(f"{folder}/traced", "w").write("refused" if refused else "held")
until = time.monotonic() + 300
while not os.path.exists(f"{folder}/release") and time.monotonic() < until:
    time.sleep(0.05)
"""


def _held(folder: Path) -> None:
    """A debugger holds rank 1, while rank 0 fails."""
    if dist.get_rank() == 1:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # anybody may debug it
        subprocess.Popen([sys.executable, "-S", "-c", _HOLDS_A_RANK, str(os.getpid()), str(folder)])
        threading.Event().wait(120)
    while not (folder / "traced").exists() or not (folder / "traced").read_text():
        time.sleep(0.05)
    raise ValueError((folder / "traced").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace")
def test_a_rank_that_a_debugger_holds_does_not_hold_launch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(faults, "HELD_SECONDS", 0.2)
    try:
        with pytest.raises(quintnet.RunError, match="rank 0 raised ValueError") as caught:
            quintnet.launch(_held, 2, (tmp_path,), timeout=240)
    finally:
        (tmp_path / "release").touch()
    if "ValueError: refused" in str(caught.value):
        pytest.skip("this system lets nobody debug a process")
    assert "killed, and not ended yet: rank 1 (pid " in capfd.readouterr().err


def _reads_what_never_comes() -> None:
    """Rank 0 waits as a host does whose NCCL collective does not end: at a line that reads a tensor."""
    for _ in range(2):
        with frequent("work"):
            pass
    if dist.get_rank() == 0:
        with frequent("work"):
            threading.Event().wait()
    time.sleep(3600)


@pytest.mark.slow
def test_a_rank_that_another_waits_for_on_its_device_is_named() -> None:
    with pytest.raises(quintnet.RunError, match="rank 1 did not come to work in time") as caught:
        quintnet.launch(_reads_what_never_comes, 2, collective_timeout=2, timeout=120)
    assert caught.value.code == "QN402" and "_reads_what_never_comes" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shape", *(pytest.param(w, marks=pytest.mark.slow) for w in ("dtype", "none"))])
def test_a_bad_batch_on_one_rank_is_the_same_error_on_all(what: str, tmp_path: Path) -> None:
    with pytest.raises(quintnet.InputError, match=r"(?s)QN102.*rank 1: .*all others: \(float64\[6, 16\]") as caught:
        quintnet.launch(_until, 3, (what, tmp_path))
    for rank in range(3):
        since, _, text = (tmp_path / f"heard{rank}").read_text().partition(" ")
        assert text == str(caught.value) and float(since) < 1, (rank, since, text)


def _goes_on(folder: Path) -> None:
    """Rank 1 is given a bad batch in its second step, and every rank catches and writes down whatever it is told."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
    program = quintnet.compile(torch.nn.Linear(8, 8), quintnet.Mesh(dp=2), batches[0], loss_fn=F.mse_loss)
    rank = int(os.environ["RANK"])
    with (folder / f"said{rank}").open("w", buffering=1) as said:
        for step, (x, y) in enumerate(batches):
            try:
                program.step((x[:, :7] if step == rank == 1 else x, y))
                print("a loss", file=said)
            except quintnet.QuintNetError as error:
                print(error.code, file=said)


def test_a_rank_that_catches_the_error_of_its_batch_is_not_a_step_behind_the_others(tmp_path: Path) -> None:
    """It would be: the others are in a step that it has left. Their rows would be of other batches than its own. In the
    end it has finished, and they wait for it: the run ends with that, if they have not caught that too by then."""
    try:
        quintnet.launch(_goes_on, 2, (tmp_path,))
    except quintnet.RunError as error:
        assert error.code == "QN402" and "rank 1 has finished after step 1; rank 0 is in step" in str(error)
    others, one = ((tmp_path / f"said{rank}").read_text().splitlines() for rank in range(2))
    assert one == ["a loss", "QN102", "QN401", "QN401"]
    assert others[:2] == ["a loss", "QN102"] and "a loss" not in others[1:]


@pytest.mark.slow
def test_watching_a_thread_that_traces_does_no_harm(tmp_path: Path) -> None:
    """Walking the frames of a thread that traces ended its process within seconds; so they are not walked."""
    watched = """
import sys, threading, torch
from pathlib import Path
sys.setswitchinterval(1e-5)
from torch.distributed import HashStore
from quintnet_compiler.runtime.launch.heartbeat import Heartbeat
import quintnet
from tests.models import CASES, build
torch.set_num_threads(1)
store = HashStore()
store.set("verdict", "")
heartbeat = Heartbeat(lambda: store, 0, 1, Path(sys.argv[1]), 1.0)
over, seen = threading.Event(), set()
def look():
    while not over.wait(0.0002):
        heartbeat._look()
        seen.add(heartbeat.place)
thread = threading.Thread(target=look)
thread.start()
for _ in range(12):
    quintnet.compile(build("gpt"), quintnet.Mesh(tp=2), CASES["gpt"].batch(8), loss_fn=CASES["gpt"].loss_fn)
over.set()
thread.join()
assert any("models.py" in at for _, at in seen), seen
"""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", watched, str(tmp_path)], cwd=root, check=True, timeout=300)


def _resumed(folder: Path, what: str, steps: int) -> tuple[list[float], int | None, list[torch.Tensor], int]:
    """A training run that goes on from its checkpoints; what it did, and the weights in the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(48, 16, generator=generator, dtype=torch.float64), torch.randint(8, (48,), generator=generator)
    )
    # the planner chooses the layout of however many ranks there are
    where = quintnet.Cluster("h100", nodes=1, gpus_per_node=size) if what == "gone" else quintnet.Mesh(dp=size)
    program = quintnet.compile(MLP().double(), where, data[:12], loss_fn=F.cross_entropy, device="cpu")
    loader = DataLoader(data, batch_sampler=quintnet.BatchSampler(48, 12, seed=3))
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    options: dict[str, Any] = {"epochs": 9, "max_steps": steps, "console": False, "log_every": 0}
    trainer = quintnet.Trainer(program, optimizer, loader, checkpoint_folder=folder, save_every=1, **options)
    step, rank = program.step, dist.get_rank() if dist.is_initialized() else 0

    kind, _, seed = what.partition(" ")
    hit = random.Random(seed)
    victims = hit.sample(range(size), 2 if kind == "two" else 1) if seed else {"kill": [1], "gone": [2]}.get(what, [])
    when, delay = hit.randrange(1, steps - 1) if seed else 3, hit.uniform(0, 0.03) if seed else 0.0
    if kind == "gone" and size < 4:
        victims = []  # its place is left out

    def strike() -> None:
        (folder / f"struck{rank}").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def faulty(*args: Any, **options: Any) -> torch.Tensor:
        struck = (folder / f"struck{rank}").exists() and kind != "gone"
        if rank in victims and trainer.history.step >= when and not struck:
            # somewhere in a step, or in the save behind it
            threading.Timer(delay, strike).start() if delay else strike()
        return step(*args, **options)

    program.step = faulty  # type: ignore[method-assign]
    history = trainer.fit()
    weights = [p.full_tensor() for p in program.parameters()]  # type: ignore[attr-defined]
    return history.losses, history.resumed_from, weights, program.mesh.size


def test_a_run_goes_on_after_a_restart_bit_by_bit(tmp_path: Path) -> None:
    whole = quintnet.launch(_resumed, 2, (tmp_path / "whole", "nothing", 6))
    (tmp_path / "cut").mkdir()
    with pytest.warns(quintnet.FaultWarning, match=r"(?s)rank 1 was killed by SIGKILL.*restart 1 of 2, with 2 ranks"):
        found = quintnet.launch(_resumed, 2, (tmp_path / "cut", "kill", 6), restarts=2)
    for (losses, _, weights, _), (later, resumed, others, _) in zip(whole, found, strict=True):
        assert resumed is not None and resumed >= 2 and losses[resumed:] == later
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.slow
def test_a_rank_that_cannot_come_back_is_left_out(tmp_path: Path) -> None:
    losses, _, weights, _ = _resumed(tmp_path / "whole", "nothing", 6)
    with pytest.warns(quintnet.FaultWarning, match=r"(?s)rank 2 was killed by SIGKILL.*restart 2 of 2, with 3 ranks"):
        found = quintnet.launch(_resumed, 4, (tmp_path / "cut", "gone", 6), restarts=2, fewest=2)
    assert len(found) == 3
    for later, resumed, others, size in found:
        assert size == 3 and resumed is not None
        torch.testing.assert_close(later, losses[resumed:])
        torch.testing.assert_close(others, weights)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds", "seconds"), [("kill", 20, 4), ("two", 10, 4), ("stop", 10, 5)])
def test_sweep(kind: str, seeds: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ranks at random moments: the weights in the end are those of a run that nothing happened to."""
    expected = quintnet.launch(_resumed, 3, (tmp_path / "whole", "nothing", 8))
    heard: list[float] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *warning, **how: heard.append(time.monotonic()))
    took, lost = [], []
    for seed in range(seeds):
        folder = tmp_path / str(seed)
        folder.mkdir()
        heard.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always", quintnet.FaultWarning)
            found = quintnet.launch(_resumed, 3, (folder, f"{kind} {seed}", 8), restarts=2)
        struck = [float(one.read_text()) for one in folder.glob("struck*")]
        assert len(struck) >= 1 and len(heard) >= 1
        took.append(heard[0] - min(struck))
        resumed = found[0][1] or 0
        lost.append(resumed)
        for (losses, _, weights, _), (later, _, others, _) in zip(expected, found, strict=True):
            assert losses[resumed:] == later
            assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True)), seed
    print(f"{kind}: {seeds} runs, named and ended after {statistics.median(took):.2f} s, at most {max(took):.2f} s")
    print(f"  went on from steps {lost}")
    assert max(took) < seconds


def test_a_run_that_takes_too_long_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(quintnet.RunError, match=r"QN304 .*\n  ranks \[0, 1\] did not finish in time"):
        quintnet.launch(time.sleep, 2, (100,), timeout=1)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    code = "from tests.test_faults import _until, Path, quintnet, sys; "
    code += "quintnet.launch(_until, 2, ('', Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = (tmp_path / "said").open("w+")
    launcher = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=said)
    until = time.monotonic() + 100
    while len([*tmp_path.glob("pid*")]) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    start = time.monotonic()
    while not _gone(tmp_path):
        assert time.monotonic() - start < 2
        time.sleep(0.05)
    lines = (tmp_path / "said").read_text().splitlines()  # torch's own words may come first
    assert lines.count("all ranks end: the process that launched them is gone") == 1
