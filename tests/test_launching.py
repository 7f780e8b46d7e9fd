"""What launch takes, sends and returns, what it says of scripts that cannot work, and what it leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import quintnet

ROOT = Path(__file__).parent.parent


def test_lambdas_closures_and_what_they_return() -> None:
    offset = torch.tensor(10.0)

    @dataclass
    class Outcome:
        rank: int
        sum: float

    def work(scale: int) -> Outcome:
        x = offset * scale + dist.get_rank()
        dist.all_reduce(x)
        return Outcome(dist.get_rank(), float(x))

    assert quintnet.launch(work, 2, (2,), timeout=60) == [Outcome(0, 41.0), Outcome(1, 41.0)]
    assert quintnet.launch(lambda: dist.get_rank(), 2, timeout=60) == [0, 1]


def _add_rank(x: Tensor) -> Tensor:
    x += dist.get_rank() + 1
    dist.barrier()
    return x


def test_each_rank_has_tensors_of_its_own() -> None:
    x = torch.zeros(2)
    found = quintnet.launch(_add_rank, 2, (x,), timeout=60)
    assert [one.tolist() for one in (x, *found)] == [[0, 0], [1, 1], [2, 2]]


def test_a_rank_may_have_workers_of_a_loader() -> None:
    rows = [torch.tensor(n) for n in range(3)]
    read = quintnet.launch(lambda: [int(x) for x in DataLoader(rows, num_workers=1)], 1, timeout=60)  # type: ignore[arg-type]
    assert read == [[0, 1, 2]]


def test_children_of_ranks_start_as_those_of_the_launching_process() -> None:
    (there,) = quintnet.launch(multiprocessing.get_start_method, 1, timeout=60)
    assert there == multiprocessing.get_start_method()


def _fail_at_length() -> None:
    raise ValueError("long " + "x" * 30_000_000)


def test_an_error_of_any_length_is_told() -> None:
    with pytest.raises(quintnet.RunError, match=r"(?s)QN302 .*rank [01] raised ValueError: long x") as caught:
        quintnet.launch(_fail_at_length, 2, timeout=60)
    assert 1_000 < len(str(caught.value)) < 300_000


SCRIPT = """
import torch.distributed as dist
import quintnet

def work():
    x = dist.get_rank()
    return x * 10

print(quintnet.launch(work, 2, timeout=60))
"""


def _run(command: list[str], folder: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, *command], input=given, env=known, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_a_script_without_a_guard_is_explained(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    made = _run([str(tmp_path / "script.py")], tmp_path)
    assert made.returncode == 1 and made.stderr.count("Traceback") == 1
    assert "QN307 " in made.stderr and 'below `if __name__ == "__main__":`' in made.stderr


@pytest.mark.slow
def test_a_script_with_a_guard_leaves_nothing(tmp_path: Path) -> None:
    guarded = SCRIPT.replace("\nprint(", '\nif __name__ == "__main__":\n    print(')
    (tmp_path / "script.py").write_text(guarded)
    assert _run([str(tmp_path / "script.py")], tmp_path).stdout == "[0, 10]\n"
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-", "-c"])
def test_a_script_without_a_file_needs_no_guard(how: str, tmp_path: Path) -> None:
    made = _run(["-"], tmp_path, SCRIPT) if how == "-" else _run(["-c", SCRIPT], tmp_path)
    assert made.stdout == "[0, 10]\n", made.stderr


SAID = {
    "SIGKILL": "all ranks end: the process that launched them is gone",
    "SIGTERM": "SIGTERM is passed on to 2 ranks",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGKILL", "all"])
def test_temporary_folders_go_with_their_launcher(how: str, tmp_path: Path) -> None:
    """``all``: nobody is left to remove them, but the next run."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    code = "import quintnet, tests.test_launching as t; quintnet.launch(t._wait, 2, ({!r},))"
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-c", code.format(str(tmp_path))]
    launcher = subprocess.Popen(command, env=known, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 100
    while len([*tmp_path.glob("rank*")]) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"quintnet", "pymp"}
    if how == "all":
        os.killpg(launcher.pid, signal.SIGKILL)
    else:
        launcher.send_signal(signal.Signals[how])
    said = launcher.communicate(timeout=20)[1]
    if how == "all":
        assert _run(["-c", "import quintnet; quintnet.launch(print, 1)"], folder).returncode == 0
    else:
        assert said.startswith(SAID.get(how, SAID["SIGKILL"])) and len(said.splitlines()) == 1, said
    until = time.monotonic() + 5
    while list(folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    assert list(folder.iterdir()) == []


def _wait(folder: str) -> None:
    Path(folder, f"rank{dist.get_rank()}").touch()
    time.sleep(100)
