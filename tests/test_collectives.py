"""What ranks exchange over gloo in place of its own collectives is what those make; how its threads are scheduled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import quintnet
from quintnet_compiler.ops.collectives import COLLECTIVES
from quintnet_compiler.runtime.transport.collectives import Exchanges, Native, SharedMemory, collectives
from quintnet_compiler.runtime.transport.distributed import DistributedTransport, device_mesh

torch.set_num_threads(1)
SHAPES = [(), (4,), (4, 3), (8, 0), (4, 5, 2)]


def _both(mine: Native, theirs: Native, shape: tuple[int, ...], dtype: torch.dtype, later: bool) -> None:
    """Whole numbers, so that every order of terms has the same sum."""
    dice = torch.Generator().manual_seed(mine.rank)
    x = torch.randint(-8, 8, shape, generator=dice).to(dtype)
    sums = []
    for one in (mine, theirs):
        moving = x.clone()
        assert one.add(moving, later)() is moving
        sums += [moving, one.all_reduce(x, later)()]  # which leaves x as it is
    for other in sums[1:]:
        assert torch.equal(sums[0], other)
    rows = x.reshape(1) if x.dim() == 0 else x
    joined, scattered = [], []
    for one in (mine, theirs):
        whole = rows.new_empty((one.size * rows.shape[0], *rows.shape[1:]))
        slot = whole[one.rank * rows.shape[0] : (one.rank + 1) * rows.shape[0]].copy_(rows)
        joined += [one.all_gather(rows, torch.empty_like(whole), later)(), one.all_gather(slot, whole, later)()]
        given = whole * (1 + one.rank)
        part = given.chunk(one.size)[one.rank]
        kept = one.reduce_scatter(given.clone(), torch.empty_like(part), later)()
        scattered += [kept, one.reduce_scatter(given, part, later)()]
    transposed = [(r + 1) % mine.size for r in range(mine.size)]
    some = [*reversed(range(mine.size - 1)), mine.size - 1]  # the last one keeps what it has
    for order in (tuple(transposed), tuple(some)):
        assert torch.equal(mine.permute(x, order)(), theirs.permute(x, order)())
    for found in (joined, scattered):
        for other in found[1:]:
            assert torch.equal(found[0], other)


def _compare() -> str:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [pairs[dist.get_rank() // 2], dist.group.WORLD]
    for group, kind in zip(groups, (SharedMemory, Exchanges), strict=True):
        assert group is not None
        mine = collectives(group)
        assert type(mine) is kind
        for one in (mine, Exchanges(group)):
            for shape in SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    for later in (False, True):
                        _both(one, Native(group), shape, dtype, later)
    _bundles()
    return "equal"


def _bundles() -> None:
    """Several in one message, over more ranks than exchange, as each alone."""
    mesh = quintnet.Mesh(dp=dist.get_world_size())
    transport = DistributedTransport(mesh, device_mesh(mesh, "cpu"))
    dice = torch.Generator().manual_seed(dist.get_rank())
    xs = [torch.randint(-8, 8, shape, generator=dice).float() for shape in ((4,), (4, 3), (3, 8, 2))]
    dims, parts = [0, 0, 1], [1, 1, 2]
    joined = transport.run("gather_together", xs, "dp", dims, parts, 0)
    scattered = transport.run("scatter_together", xs, "dp", dims, parts, 0)
    for x, dim, n, whole, part in zip(xs, dims, parts, joined, scattered, strict=True):
        assert torch.equal(whole, transport.run("all_gather", x, "dp", dim, n, 0))
        assert torch.equal(part, transport.run("reduce_scatter", x, "dp", dim, n, 0))


def _meanings() -> str:
    """A collective by its meaning is what the transport's own method makes."""
    mesh = quintnet.Mesh(dp=2)
    transport = DistributedTransport(mesh, device_mesh(mesh, "cpu"))
    x = torch.arange(16.0).view(4, 4) + 100 * dist.get_rank()
    for name, how in {"all_to_all": (0, 1, 1, 2)}.items():
        own = transport.run(name, x, "dp", *how, 0)
        for later in (False, True):
            assert torch.equal(own, transport._meant(COLLECTIVES[name], x, "dp", *how, 0, later=later)())
    return "equal"


def test_a_collective_without_a_method_is_carried_out_by_its_meaning() -> None:
    assert quintnet.launch(_meanings, 2, timeout=100) == ["equal"] * 2


@pytest.mark.slow
def test_exchanges_equal_gloo() -> None:
    assert quintnet.launch(_compare, 4, timeout=100) == ["equal"] * 4


def _policies() -> list[tuple[str, int]]:
    batch = (torch.zeros(2, 4), torch.zeros(2, 1))
    model, loss_fn = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss
    quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=loss_fn).step(batch)
    threads = Path("/proc/self/task").iterdir()
    return [((t / "comm").read_text().strip(), os.sched_getscheduler(int(t.name))) for t in threads]


@pytest.mark.skipif(sys.platform != "linux", reason="batch threads are Linux's")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="before, gloo's threads may have no names")
def test_only_gloos_readers_wait_for_a_free_core() -> None:
    for found in quintnet.launch(_policies, 2, timeout=100):
        readers = {policy for name, policy in found if name == "gloo_tcp_loop"}
        others = {policy for name, policy in found if name != "gloo_tcp_loop"}
        usual = os.sched_getscheduler(0)  # the tests themselves may have been started with another policy
        assert readers == {os.SCHED_BATCH if usual == os.SCHED_OTHER else usual}
        assert others == {usual}
