"""Runs that go on with fewer ranks, and with more: as if nothing had happened, up to the order of sums."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import quintnet

from .growing_run import train

ROOT = Path(__file__).parent.parent


def _steps(folder: Path) -> list[tuple[int, int, float]]:
    """Each step in the order in which they ran: its number, the ranks, and the loss."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    return [(int(step), int(size), float(loss)) for step, size, loss in map(str.split, lines)]


def _sizes(folder: Path) -> list[int]:
    sizes = [size for _, size, _ in _steps(folder)]
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]


def _require_same(folder: Path, whole: Path) -> None:
    """A batch with another row, or with other dropout masks, would have another loss."""
    losses = {step: loss for step, _, loss in _steps(folder)}
    expected = {step: loss for step, _, loss in _steps(whole)}
    assert losses.keys() == expected.keys() and list(expected) == list(range(1, len(expected) + 1))
    for step, loss in expected.items():
        torch.testing.assert_close(losses[step], loss, rtol=1e-9, atol=0)


def test_a_run_loses_a_rank_and_gets_it_back(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = train(str(whole), 12)

    def available() -> range:
        return range(1 if (cut / "lost").exists() and not (cut / "back").exists() else 2)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", quintnet.FaultWarning)  # unless its place is seen to be gone first
        found = quintnet.launch(train, 2, (str(cut), 12, 0.0, True), restarts=1, fewest=1, available=available)
    assert len(found) == 2 and _sizes(cut) == [2, 1, 2]
    _require_same(cut, whole)
    for weights in found:
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    one = [index for index, (_, size, _) in enumerate(_steps(cut)) if size == 1]
    later = [step for step, _, _ in _steps(cut)[one[0] :]]
    assert later == list(range(later[0], 13))  # no step of the one rank was lost or repeated when another joined


def _node(folder: Path, steps: int, name: str) -> subprocess.Popen[bytes]:
    """A node of one rank that joins a run of one or two."""
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-id", "growing", "--rdzv-endpoint", "127.0.0.1:29437", "--local-addr", "127.0.0.1"]
    conf = f"is_host={int(name == 'first')},last_call_timeout=1,keep_alive_interval=1"
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-conf", conf, "-m", "tests.growing_run"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a node that joins waits in vain for torchrun's own
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"out-{name}").open("w") as out:
        return subprocess.Popen(
            [*command, str(folder), "2", str(steps), "0.1"],
            stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip


def _kill(node: subprocess.Popen[bytes]) -> None:
    """torchrun's rank has a session of its own."""
    ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for process in [node.pid, *map(int, ranks)]:
        os.kill(process, signal.SIGKILL)
    node.wait()


def _until(folder: Path, sizes: list[int]) -> None:
    until = time.monotonic() + 120
    while _sizes(folder) != sizes:
        told = "\n".join(one.read_text() for one in folder.glob("out-*"))
        assert time.monotonic() < until, (_sizes(folder), told)
        time.sleep(0.1)


@pytest.mark.slow
def test_nodes_join_a_run_under_torchrun_and_leave_it(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = train(str(whole), 600)
    nodes = [_node(cut, 600, "first")]
    try:
        _until(cut, [1])
        nodes.append(_node(cut, 600, "second"))
        _until(cut, [1, 2])
        _kill(nodes[1])
        _until(cut, [1, 2, 1])
        nodes.append(_node(cut, 600, "third"))
        _until(cut, [1, 2, 1, 2])
        (cut / "hurry").touch()
        codes = [nodes[index].wait(200) for index in (0, 2)]
        assert codes == [0, 0], "\n".join(one.read_text() for one in cut.glob("out-*"))
    finally:
        for one in nodes:
            if one.poll() is None:
                _kill(one)
    _require_same(cut, whole)
    for rank in range(2):
        weights = torch.load(cut / f"weights{rank}")
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
