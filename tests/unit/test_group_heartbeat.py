"""The heartbeat of a process group that launch did not make: over the group's store, and as long as the group is."""

from __future__ import annotations

import atexit
import contextvars
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from quintnet_compiler.compat.distributed import PrefixStore, TCPStore, store_of_world
from quintnet_compiler.runtime.launch import group_heartbeat
from quintnet_compiler.runtime.launch.board import Board
from quintnet_compiler.runtime.launch.faults import number_space
from quintnet_compiler.runtime.launch.heartbeat import VERDICT, beats, current_heartbeat
from quintnet_compiler.runtime.launch.inside_launcher import Neighbours
from quintnet_compiler.runtime.launch.rank_status import RankStatus, read_rows


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Callable[[], None]]]:
    """A group of one process, which is told that there is another one; what it would do when it ends."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=5))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda leave, *args: found.append(lambda: leave(*args)))
    yield found
    for leave in found:
        leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _store() -> Any:
    found = store_of_world()
    assert found is not None
    return PrefixStore("quintnet", found.clone())


def _in_its_own_context(body: Callable[[], None]) -> None:
    """The heartbeat of a context stays in it."""
    contextvars.copy_context().run(body)


def test_one_heartbeat_that_says_how_it_ends(at_exit: list[Callable[[], None]], tmp_path: Path) -> None:
    def body() -> None:
        assert current_heartbeat() is None and not beats()
        for _ in range(2):
            group_heartbeat.watch_group()
        pulse = current_heartbeat()
        assert pulse is not None and len(at_exit) == 1 and beats()
        assert [one.name.partition("-")[0] for one in tmp_path.iterdir()] == ["quintnet"]
        store = _store()
        rows = read_rows(store, range(2))  # the other rank has not come yet: nobody waits for it
        assert rows[0].pid == os.getpid() and rows[0].space == number_space() and rows[1] == RankStatus()
        at_exit[0]()
        assert read_rows(store, [0])[0].finished and current_heartbeat() is None and not beats()
        assert store.get(VERDICT) == b"" and not [*tmp_path.iterdir()]

    _in_its_own_context(body)


def test_an_error_of_this_rank_is_told(at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        group_heartbeat.watch_group()
        store = _store()
        monkeypatch.setattr(sys, "last_value", ValueError("no more rows"), raising=False)
        at_exit[0]()
        assert store.get(VERDICT) == b"rank 0 raised ValueError: no more rows"
        assert not read_rows(store, [0])[0].finished

    _in_its_own_context(body)


def test_it_ends_with_its_group(at_exit: list[Callable[[], None]]) -> None:
    def body() -> None:
        group_heartbeat.watch_group()
        pulse = current_heartbeat()
        assert pulse is not None
        pulse.verdict = ""
        dist.destroy_process_group()
        pulse.thread.join(5)
        assert not beats() and current_heartbeat() is None

    _in_its_own_context(body)


def test_a_process_of_the_users_own_may_end_only_where_it_waits(at_exit: list[Callable[[], None]]) -> None:
    def body() -> None:
        group_heartbeat.watch_group()
        pulse = current_heartbeat()
        assert pulse is not None and not pulse.may_end and pulse._waits_in() is None
        pulse.inside = True
        assert pulse.may_end and pulse._waits_in() == pulse.now.number
        pulse.inside = False

    _in_its_own_context(body)


def test_a_neighbour_that_has_ended_is_named_after_a_second(at_exit: list[Callable[[], None]], tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    store, watch = _store(), Neighbours(0, 2, 60.0, tmp_path)

    def write(**row: object) -> None:

        store.set("1", json.dumps({"beat": 3, "step": 2, "pid": child, "host": "h", "space": number_space(), **row}))

    write()
    Board(tmp_path, 1, 2).enter(1, "step", 4)  # later than what it said last
    os.waitpid(child, 0)
    found = [watch.look(store) for _ in range(12)]
    assert found[:10] == [None] * 10 and found[11] is not None
    assert found[11].code == "QN302" and found[11].message == f"rank 1 has ended in step 4 (pid {child} on h)"
    write(space="elsewhere")  # numbers of processes of another machine
    assert watch.look(store) is None
    write(finished=True)
    assert Neighbours(0, 2, 0.0, tmp_path).look(store) is None
