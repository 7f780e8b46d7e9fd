"""Messages between two ends of a connection through memory that both have, in one process."""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from quintnet_compiler.runtime.transport import shared_memory
from quintnet_compiler.runtime.transport.shared_memory import (
    MAX_POLLS,
    MAX_VIEWS,
    MIN_BLOCK_BYTES,
    SECRET_BYTES,
    MemoryLink,
    _accept,
    _connect,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and SOCK_SEQPACKET are Linux's")
Ends = tuple[MemoryLink, MemoryLink]


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield MemoryLink(pair[0], 0.2), MemoryLink(pair[1], 0.2)
    for one in pair:
        one.close()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2**10, 2**8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_each_end_gets_what_the_other_puts(ends: Ends, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = [torch.randint(0, 2, shape).to(dtype) for _ in ends]
    waits = [end.exchange(x, torch.clone) for end, x in zip(ends, given, strict=True)]
    made = [wait() for wait in waits]
    assert torch.equal(made[0], given[1]) and torch.equal(made[1], given[0]) and made[0].dtype is dtype


def test_exchanges_end_in_any_order(ends: Ends) -> None:
    """What was put may change at once, and is not overwritten before it is read."""
    waits: list[list[object]] = [[], []]
    for number in range(4):
        for index, end in enumerate(ends):
            x = torch.tensor([10 * number + index])
            waits[index].append(end.exchange(x, torch.clone))
            x.zero_()
    assert [int(waits[0][n]()) for n in (2, 0, 3, 1)] == [21, 1, 31, 11]  # type: ignore[operator]
    assert [int(waits[1][n]()) for n in (3, 2, 1, 0)] == [30, 20, 10, 0]  # type: ignore[operator]


def test_memory_is_used_again(ends: Ends) -> None:
    for number in range(20):
        waits = [end.exchange(torch.full((number % 5, 3), float(number)), torch.sum) for end in ends]
        assert [float(wait()) for wait in waits] == [number * (number % 5) * 3.0] * 2
    assert [end.own[0].memory.numel() for end in ends] == [MIN_BLOCK_BYTES] * 2
    assert [len(end.own) for end in ends] == [2, 2]  # one that is read, and one for the next


def test_memory_is_used_again_where_one_end_puts_and_the_other_takes() -> None:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source, target = (MemoryLink(one, 60.0, both=False) for one in pair)  # who puts does not wait
    for number in range(10):
        source.send_tensor(torch.full((2,), float(number)))
        source.send_tensor(torch.full((3,), float(-number)))
        first, second = (target.receive_next((size,), torch.float32, torch.sum) for size in (2, 3))
        assert float(second()) == -3.0 * number and float(first()) == 2.0 * number
    assert len(source.own) == 2 and not target.own
    for one in pair:
        one.close()


def test_of_many_shapes_few_views_are_kept(ends: Ends) -> None:
    for size in range(MAX_VIEWS + 6):
        waits = [end.exchange(torch.full((size,), float(size)), torch.clone) for end in ends]
        assert [wait().tolist() for wait in waits] == [[float(size)] * size] * 2
    assert all(len(block.views) <= MAX_VIEWS for end in ends for block in end.own + end.others)


def test_who_looked_in_vain_looks_less_often_until_a_message_is_there(ends: Ends) -> None:
    late = ends[0].exchange(torch.ones(1), torch.clone)
    with pytest.raises(dist.DistError, match="timed out"):
        late()
    assert ends[0].polls == MAX_POLLS // 2
    ends[1].send_tensor(torch.ones(1))
    late()
    assert ends[0].polls == MAX_POLLS


def test_an_end_that_does_not_come_is_waited_for_so_long(ends: Ends) -> None:
    wait = ends[0].exchange(torch.ones(2), torch.clone)
    with pytest.raises(dist.DistError, match=r"timed out after 0.2 s"):
        wait()


def test_an_end_that_is_gone_is_noticed(ends: Ends) -> None:
    wait = ends[0].exchange(torch.ones(2), torch.clone)
    ends[1].connection.close()
    with pytest.raises(dist.DistNetworkError, match="Connection"):
        wait()
    with pytest.raises(dist.DistNetworkError, match="Connection"):
        ends[0].exchange(torch.ones(2), torch.clone)


def test_ends_that_exchange_other_things_are_told(ends: Ends) -> None:
    waits = [end.exchange(torch.ones(size), torch.clone) for end, size in zip(ends, (2, 3), strict=True)]
    with pytest.raises(dist.DistError, match=r"float32\[2\] is expected of another rank, which sent 12 bytes"):
        waits[0]()


def test_only_who_knows_the_secret_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ACCEPT_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind("")
        door.listen()
        name, secret = door.getsockname(), b"s" * SECRET_BYTES
        stranger, friend = _connect(name, b"x" * SECRET_BYTES), _connect(name, secret)
        assert stranger is not None and friend is not None
        found = _accept(door, secret)
        assert found is not None
        ends = MemoryLink(found, 1.0), MemoryLink(friend, 1.0)
        waits = [end.exchange(torch.ones(1), torch.clone) for end in ends]
        assert [float(wait()) for wait in waits] == [1.0, 1.0]
        assert stranger.recv(1) == b""
        assert _accept(door, secret) is None
        for one in (stranger, found, friend):
            one.close()


def test_a_process_of_another_host_is_not_found() -> None:
    assert _connect(b"\0nobody listens here", b"s" * SECRET_BYTES) is None


@pytest.mark.slow
def test_an_end_that_nothing_needs_is_closed_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        links = [MemoryLink(end, 0.2) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        files = [link.connection.fileno() for link in links]
        del links
        gc.collect()
        assert _connect(b"\0nobody listens here", b"s" * SECRET_BYTES) is None
        gc.collect()
    assert not [warning for warning in told if warning.category is ResourceWarning]
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
