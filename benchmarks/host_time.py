"""What the host spends on a collective of generated code beside the bare call of torch.distributed.

python benchmarks/host_time.py [--world fake|gloo] [--ranks 2|4|8] [--calls N] [--json]

``fake``: torch's process group for tests, whose collectives return at once, so that nothing but Python and the
allocator is left. ``gloo``: real ranks; the differences then hold what gloo does, too. Each line is a call as it
stands in a generated function (``comm.all_reduce(x, 'tp', 0)``; with ``wait``: started and waited for) or in the
interpreter (``start_sum``, ``send``, ``receive``), on 8 by 8 numbers, with the allocations and copies that it makes;
beside it the collective that it begins, into memory that was allocated beforehand. The two alternate call by call;
microseconds, medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import quintnet
from quintnet_compiler.runtime.execute.comm import Comm
from quintnet_compiler.runtime.transport.connections import Connection
from quintnet_compiler.runtime.transport.distributed import DistributedTransport, device_mesh
from quintnet_compiler.runtime.transport.transport import GRADIENTS, VALUES

AIM = 20.0  # microseconds that a call of generated code may add
WARM = 200  # calls
SIZE = 8  # rows and columns: one of each for each of eight ranks

Call = Callable[[], object]
Calls = Mapping[str, tuple[Call, Call]]  # ours, and the bare one

# torch 2.13 renamed these two
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _collectives(ranks: int) -> Calls:
    mesh = quintnet.Mesh(tp=ranks)
    transport = DistributedTransport(mesh, device_mesh(mesh, "cpu"))
    comm, group = Comm(transport, mesh, transport.place), transport.axis["tp"].group
    x = torch.zeros(SIZE, SIZE)
    xs, flat, same = [x] * 4, torch.zeros(4 * SIZE**2), x.clone()
    x2 = torch.zeros(2 * SIZE, SIZE)
    everyone, up, down = tuple(range(ranks)), (transport.rank + 1) % ranks, (transport.rank - 1) % ranks
    around = tuple((rank - 1) % ranks for rank in everyone)

    def reduced(later: bool = False) -> object:
        work = dist.all_reduce(x, group=group, async_op=later)
        return work.wait() if later else None

    def gathered(source: Tensor, later: bool = False) -> Call:
        into = source.new_empty(ranks * source.shape[0], *source.shape[1:])

        def call() -> object:
            work = gather_single(into, source, group=group, async_op=later)
            return work.wait() if later else None

        return call

    def scattered(source: Tensor) -> Call:
        into = source.new_empty(source.shape[0] // ranks, *source.shape[1:])
        return lambda: scatter_single(into, source, group=group)

    def permuted() -> object:
        moves = [dist.P2POp(dist.isend, x, up, group), dist.P2POp(dist.irecv, same, down, group)]
        return [work.wait() for work in dist.batch_isend_irecv(moves)]

    zeros, ones = [0] * 4, [1] * 4
    return {
        "all_reduce": (lambda: comm.all_reduce(x, "tp", 0), reduced),
        "all_reduce, wait": (lambda: comm.wait(comm.start_all_reduce(x, "tp", 0), 0), lambda: reduced(True)),
        "all_gather of rows": (lambda: comm.all_gather(x, "tp", 0, 1, 0), gathered(x)),
        "all_gather of columns": (lambda: comm.all_gather(x, "tp", 1, 1, 0), gathered(x)),
        "all_gather of two parts": (lambda: comm.all_gather(x, "tp", 0, 2, 0), gathered(x)),
        "all_gather, wait": (lambda: comm.wait(comm.start_all_gather(x, "tp", 0, 1, 0), 0), gathered(x, True)),
        "reduce_scatter of rows": (lambda: comm.reduce_scatter(x, "tp", 0, 1, 0), scattered(x)),
        "reduce_scatter of columns": (lambda: comm.reduce_scatter(x, "tp", 1, 1, 0), scattered(x)),
        "reduce_scatter of two parts": (lambda: comm.reduce_scatter(x2, "tp", 0, 2, 0), scattered(x2)),
        "all_to_all": (
            lambda: comm.all_to_all(x, "tp", 0, 1, 1, 1, 0),
            lambda: dist.all_to_all_single(same, x, group=group),
        ),
        "gather_together of 4": (lambda: comm.gather_together(xs, "tp", zeros, ones, 0), gathered(flat)),
        "scatter_together of 4": (lambda: comm.scatter_together(xs, "tp", zeros, ones, 0), scattered(flat)),
        "permute": (lambda: transport.permute(x, "tp", around, 0)(), permuted),
        "start_sum, wait": (lambda: transport.start_sum(x, everyone, "")(), lambda: reduced(True)),
    }


def _transfers(ranks: int) -> Calls:
    """Between neighbours of two, each of whom sends and receives."""
    mesh = quintnet.Mesh(pp=ranks)
    transport = DistributedTransport(mesh, device_mesh(mesh, "cpu"))
    rank, other = transport.rank, transport.rank ^ 1
    there, back = (VALUES, GRADIENTS) if other > rank else (GRADIENTS, VALUES)
    x, got = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    transport.connect(sorted(Connection(way, a, b) for a, b in ((0, 1), (1, 0)) for way in (VALUES, GRADIENTS)))
    out, into = (
        transport.connections.group[Connection(there, rank, other)],
        transport.connections.group[Connection(back, other, rank)],
    )

    def ours() -> object:
        sent = transport.send(x, other, there, "")
        transport.receive((SIZE, SIZE), x.dtype, other, back, "")()
        return sent()

    def bare() -> object:
        sent, received = dist.isend(x, other, group=out), dist.irecv(got, other, group=into)
        assert sent is not None and received is not None
        return received.wait(), sent.wait()

    return {"send and receive": (ours, bare)}


def measure(calls: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each call, ours and the bare one."""
    torch.set_num_threads(1)
    microseconds, ranks = {}, dist.get_world_size()
    with torch.no_grad():
        for name, pair in {**_collectives(ranks), **_transfers(ranks)}.items():
            times: tuple[list[int], list[int]] = [], []
            gc.disable()
            for index in range(calls + WARM):
                for call, durations in zip(pair, times, strict=True):
                    start = time.perf_counter_ns()
                    call()
                    end = time.perf_counter_ns()
                    if index >= WARM:
                        durations.append(end - start)
            gc.enable()
            ours, bare = (statistics.median(durations) / 1e3 for durations in times)
            microseconds[name] = ours, bare
    return microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=("fake", "gloo"), default="fake")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), help="8 by default, of gloo 2")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.world == "fake":
        dist.init_process_group("fake", rank=0, world_size=args.ranks or 8, store=FakeStore())
        microseconds = measure(args.calls)
        dist.destroy_process_group()
    else:
        microseconds = quintnet.launch(measure, args.ranks or 2, (args.calls,))[0]
    if args.json:
        print(json.dumps(microseconds, indent=2))
        return
    print(f"{'µs':<28}{'quintnet':>10}{'torch':>10}{'more':>10}")
    for name, (ours, bare) in microseconds.items():
        print(f"{name:<28}{ours:10.1f}{bare:10.1f}{ours - bare:10.1f}{'  !' if ours - bare > AIM else ''}")


if __name__ == "__main__":
    main()
