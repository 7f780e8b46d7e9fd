"""What launch says of machines and processes that cannot start ranks, and of callers that fail once."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

import quintnet
from quintnet_compiler.runtime.launch import attempt, board
from quintnet_compiler.runtime.launch.board import Board
from quintnet_compiler.runtime.launch.launch import Places


def _rank() -> int:
    return torch.distributed.get_rank()


def _in_daemon(answers: Any) -> None:
    try:
        answers.put(quintnet.launch(_rank, 2, timeout=200))
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("daemon", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_daemonic_process_is_told(daemon: bool) -> None:
    """And the fix works."""
    context = mp.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_in_daemon, args=(answers,), daemon=daemon)
    process.start()
    answer = answers.get(timeout=240)
    process.join(60)
    assert answer == [0, 1] if not daemon else answer.startswith("RunError: QN307") and "daemonic" in answer


NO_LOOPBACK = """
import json, subprocess, sys, time
import quintnet
from tests.test_machines_that_cannot_launch import _rank

if __name__ == "__main__":
    answers = {}
    for network, command in json.loads(sys.argv[1]).items():
        subprocess.run(command, shell=True, check=True)
        began = time.monotonic()
        try:
            answers[network] = quintnet.launch(_rank, 2, timeout=200)
        except quintnet.RunError as error:
            answers[network] = f"{error} {time.monotonic() - began < 60}"
    print(json.dumps(answers))
"""
NETWORKS = {
    "no address": ":",
    "IPv6 only": "ip link set lo up && ip -4 addr flush dev lo",
    "fixed": "ip addr add 127.0.0.1/8 dev lo",
}


@pytest.mark.slow
def test_a_machine_without_loopback_is_told_at_once(tmp_path: Path) -> None:
    """And the same process can launch when the machine has it."""
    unshare = shutil.which("unshare")
    apart = [unshare or "", "-r", "-n"]
    if unshare is None or shutil.which("ip") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this system gives no network of its own to a process")
    (tmp_path / "script.py").write_text(NO_LOOPBACK)
    command = [*apart, sys.executable, str(tmp_path / "script.py"), json.dumps(NETWORKS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    answers = json.loads(done.stdout)
    assert answers.pop("fixed") == [0, 1]
    for said in answers.values():
        assert "QN307" in said and "no loopback of IPv4 (127.0.0.1)" in said and said.endswith("True")
    assert answers.keys() == {"no address", "IPv6 only"}


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file without room would end the process by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    Board(tmp_path, 0, 2)
    assert (tmp_path / board.NAME).stat().st_blocks > 0
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(quintnet.RunError, match=f"QN307(?s:.*){tmp_path}.*No space left on device"):
        Board(tmp_path, 0, 2)
    with pytest.raises(quintnet.RunError, match=r"QN307(?s:.*)No such file"):
        Board(tmp_path / "none", 0, 2)


def _answers(*given: Any) -> Callable[[], Collection[int]]:
    left = iter(given)

    def available() -> Collection[int]:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    return available


def test_places_are_as_before_where_asking_fails() -> None:
    places = Places(3, 1, _answers({0, 2}, OSError("busy"), OSError("busy"), None, {1}, OSError("busy")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [places.available() for _ in range(6)] == [[0, 2]] * 4 + [[1]] * 2
    assert [str(one.message).partition(";")[0] for one in told] == [
        "available raised OSError: busy",
        "available raised TypeError: 'NoneType' object is not iterable",
        "available raised OSError: busy",
    ]
    with pytest.raises(OSError, match="busy"):  # the first time, nothing runs yet
        Places(3, 1, _answers(OSError("busy"))).available()


def test_the_time_limit_holds_while_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take longer than all else, where a machine is busy."""
    begun: list[float] = []

    def slow() -> None:
        begun.append(time.monotonic())
        time.sleep(8)

    monkeypatch.setattr(attempt, "mark_fork_server_folder", slow)
    with pytest.raises(quintnet.RunError, match=r"QN304(?s:.*)not started in time"):
        quintnet.launch(_rank, 2, timeout=1)
    assert begun and time.monotonic() < begun[0] + 7
    monkeypatch.undo()
    assert quintnet.launch(_rank, 2, timeout=200) == [0, 1]


def _raises_escapes() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("\x1b[2J\x1b]0;title\x07red\r\x9b31m")


def test_errors_of_ranks_show_what_would_steer_a_terminal() -> None:
    with pytest.raises(quintnet.RunError) as caught:
        quintnet.launch(_raises_escapes, 2, timeout=200)
    text = str(caught.value)
    assert r"\x1b[2J\x1b]0;title\x07red" in text
    assert all(c.isprintable() or c in "\n\t" for c in text + caught.value.message)
