"""Ranks that torchrun started: restarts, and two nodes with a network between that can be cut."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NODES = ("quintnet-a", "quintnet-b")


def _start(prefix: list[str], options: list[str], what: str, folder: Path, steps: int, ranks: int, patience: float,
           name: str = "out", **environment: str) -> subprocess.Popen[str]:  # fmt: skip
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.torchrun_ranks"]
    with (folder / name).open("w") as out:
        return subprocess.Popen(
            [*command, what, str(folder), str(steps), str(ranks), str(patience)], stdout=out, stderr=out, text=True,
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip


def _results(folder: Path) -> list[str]:
    return [one.read_text() for one in sorted(folder.glob("result*"))]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_torchrun_restarts_what_it_started(what: str, tmp_path: Path) -> None:
    done = {}
    for case in ("nothing", what):
        folder = tmp_path / case
        folder.mkdir()
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        running = _start([], options, case, folder, 8, 2, 60)
        assert running.wait(200) == 0, (folder / "out").read_text()
        done[case] = _results(folder)
        assert len(done[case]) == 2
    assert done["nothing"] == done[what]
    text = (tmp_path / what / "out").read_text()
    assert bool(re.search(r"QN303.*\n  rank 1 was stopped \(SIGSTOP\) in step [12] ", text)) == (what == "stop"), text


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    try:
        for node in NODES:
            _ip("netns", "add", node)
        _ip("link", "add", "qn-a", "netns", NODES[0], "type", "veth", "peer", "name", "qn-b", "netns", NODES[1])
    except (OSError, subprocess.CalledProcessError):
        _remove()
        pytest.skip("network namespaces cannot be made here")
    for index, node in enumerate(NODES):
        device = f"qn-{'ab'[index]}"
        _ip("-n", node, "addr", "add", f"10.213.7.{index + 1}/24", "dev", device)
        _ip("-n", node, "link", "set", device, "up")
        _ip("-n", node, "link", "set", "lo", "up")
    yield
    _remove()


def _remove() -> None:
    for node in NODES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            _ip("netns", "del", node)


def _nodes(what: str, folder: Path, steps: int, patience: float, restarts: int = 0) -> list[subprocess.Popen[str]]:
    found = []
    for index, node in enumerate(NODES):
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
        options += ["--rdzv-id", "q", "--rdzv-endpoint", "10.213.7.1:29431", "--local-addr", f"10.213.7.{index + 1}"]
        options += ["--rdzv-conf", f"is_host={int(index == 0)}"]
        prefix = ["ip", "netns", "exec", node]
        name = f"out{index}"
        device = f"qn-{'ab'[index]}"
        found.append(_start(prefix, options, what, folder, steps, 4, patience, name, GLOO_SOCKET_IFNAME=device))
    return found


def _reach(folder: Path, step: int, running: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 120
    while not all((folder / f"at{r}").exists() and int((folder / f"at{r}").read_text().split()[0] or 0) >= step
                  for r in range(4)):  # fmt: skip
        assert time.monotonic() < until and all(one.poll() is None for one in running), _told(folder)
        time.sleep(0.2)


def _told(folder: Path) -> str:
    return "\n".join(one.read_text() for one in sorted(folder.glob("out*")))


def _end(running: list[subprocess.Popen[str]]) -> None:
    for one in running:
        if one.poll() is None:
            one.terminate()
    for one in running:
        try:
            one.wait(40)
        except subprocess.TimeoutExpired:
            one.kill()


@pytest.mark.slow
def test_a_rank_of_another_node_that_dies_is_started_again(network: None, tmp_path: Path) -> None:
    running = _nodes("kill", tmp_path, 8, 60, restarts=3)
    try:
        assert [one.wait(280) for one in running] == [0, 0], _told(tmp_path)
    finally:
        _end(running)
    found = _results(tmp_path)
    assert len(found) == 4 and len({*found}) == 1 and (tmp_path / "struck").exists()


@pytest.mark.slow
def test_a_link_that_is_down_for_a_while_does_no_harm(network: None, tmp_path: Path) -> None:
    running = _nodes("slow", tmp_path, 12, 40)
    try:
        _reach(tmp_path, 3, running)
        _ip("-n", NODES[1], "link", "set", "qn-b", "down")
        time.sleep(4)
        _ip("-n", NODES[1], "link", "set", "qn-b", "up")
        assert [one.wait(200) for one in running] == [0, 0], _told(tmp_path)
    finally:
        _end(running)
    assert len({*_results(tmp_path)}) == 1


@pytest.mark.slow
def test_a_link_that_stays_down_is_named(network: None, tmp_path: Path) -> None:
    running = _nodes("slow", tmp_path, 1000, 8)
    try:
        _reach(tmp_path, 3, running)
        _ip("-n", NODES[1], "link", "set", "qn-b", "down")
        start = time.monotonic()
        while not all("nothing" in (tmp_path / f"out{n}").read_text() or "has not" in (tmp_path / f"out{n}").read_text()
                      for n in range(2)):  # fmt: skip
            assert time.monotonic() < start + 20, _told(tmp_path)
            time.sleep(0.1)
        print(f"named on both nodes after {time.monotonic() - start:.1f} s")
        assert re.search(r"rank [23] has said nothing for 8 s in step \d+|nothing is heard of ranks 2 .*, 3",
                         (tmp_path / "out0").read_text())  # fmt: skip
        assert re.search(r"10\.213\.7\.1:\d+ has not answered for 8 s", (tmp_path / "out1").read_text())
    finally:
        _end(running)
