"""Groups beside the world's wait as long as the world's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from quintnet_compiler.compat.distributed import TCPStore, timeout_of
from quintnet_compiler.runtime.transport.groups import mesh_of_groups, new_group, patience_of_world


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank, which waits for 7 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=5))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("ranks", [None, (0,)])
def test_a_new_group_waits_as_long_as_the_world(ranks: tuple[int, ...] | None) -> None:
    assert timeout_of(dist.new_group(ranks)) != 7
    assert timeout_of(new_group(ranks)) == timeout_of(new_group(ranks, "gloo")) == patience_of_world() == 7


@pytest.mark.usefixtures("world")
def test_groups_of_a_mesh_wait_as_long_as_the_world() -> None:
    mesh = mesh_of_groups("cpu", torch.zeros(1, 1, dtype=torch.int64), ("dp", "tp"))
    assert [timeout_of(mesh.get_group(name)) for name in ("dp", "tp")] == [7, 7]
