"""One process per rank on torch.distributed: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...compat.interpreter import call_once
from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.axes import AXES
from ...core.errors import RunError
from ...core.mesh import Mesh
from ...ops.collectives import COLLECTIVES, CollectiveSpec
from .collectives import Native, collectives, pending
from .connections import Connection, Connections
from .groups import mesh_of_groups, new_group
from .narrow import as_bytes, moved_as_bytes
from .shared_memory import link_can_send
from .transport import Pending, Wait

T = TypeVar("T")

# The order of a DeviceMesh's dims: the pipeline outermost, then the axes in the order in which shardings nest.


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Return ``mesh`` as a DeviceMesh, outermost axis first: all axes of more than one rank, and always ``dp``."""
    names = [name for name in AXES if mesh[name] > 1 or name == "dp"]
    places = itertools.product(*(range(mesh[name]) for name in names))
    ranks = torch.tensor([mesh.rank(dict(zip(names, place, strict=True))) for place in places])
    return mesh_of_groups(device_type, ranks.reshape([mesh[name] for name in names]), tuple(names))


def shared_transport(mesh: Mesh, device_type: str) -> DistributedTransport:
    """Return the transport of a mesh, which all its programs share.

    Every rank must ask for the same meshes in the same order. Process groups are made once and stay until the world's
    is destroyed. Making one takes sockets and threads, and destroying one is collective with NCCL, but a program may be
    collected on one rank before it is on another.
    """
    world = dist.group.WORLD
    assert world is not None
    transports = _transports(world)
    if (mesh, device_type) not in transports:
        transports[mesh, device_type] = DistributedTransport(mesh, device_mesh(mesh, device_type))
    return transports[mesh, device_type]


@call_once
def _transports(world: dist.ProcessGroup) -> dict[tuple[Mesh, str], DistributedTransport]:
    """Return the transports of this world; those of an earlier world are dropped."""
    return {}


class DistributedTransport:
    """Axes bound to process groups.

    Raises:
        RunError: QN301 if the world has another size than the mesh.
    """

    def __init__(self, mesh: Mesh, devices: DeviceMesh, groups: Iterable[tuple[int, ...]] = ()) -> None:
        self.mesh, self.rank = mesh, dist.get_rank()
        if dist.get_world_size() != mesh.size:
            raise RunError(
                "QN301",
                f"{mesh} needs {mesh.size} ranks, and the world has {dist.get_world_size()}",
                fix=f"start {mesh.size} processes",
            )
        self.place = mesh.coordinate(self.rank)
        self.devices = devices
        axes = [axis for axis in mesh.names if mesh[axis] > 1]
        self.axis = {axis: collectives(devices.get_group(axis)) for axis in axes}
        self.group: dict[tuple[int, ...], Native] = {mesh.peers(self.rank, [axis]): self.axis[axis] for axis in axes}
        if mesh.size > 1:
            assert dist.group.WORLD is not None
            self.group.setdefault(tuple(range(mesh.size)), collectives(dist.group.WORLD))
        self.grouped = set(self.group)  # sets of ranks, also those without this one
        self.created: dict[tuple[str, torch.device, Callable[..., Any]], Any] = {}  # kernels for an axis
        self.connections = Connections()
        self.add_groups(groups)

    def add_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Make process groups. Every rank must call this with the same groups in the same order."""
        for ranks in groups:
            if ranks not in self.grouped and len(ranks) > 1:
                self.grouped.add(ranks)
                group = new_group(ranks)
                if self.rank in ranks:
                    self.group[ranks] = collectives(group)

    def connect(self, connections: Iterable[Connection]) -> None:
        """Connect stages. Every rank must call this with the same connections in the same order."""
        self.connections.add(connections, self._device())

    # -- collectives of the graphs

    def run(self, collective: str, *args: Any) -> Any:
        return self._begin(collective)(*args)()

    def start(self, collective: str, *args: Any) -> Pending:
        return self._begin(collective)(*args, later=True)

    def _begin(self, collective: str) -> Callable[..., Pending]:
        method: Callable[..., Pending] | None = getattr(self, f"_{collective}", None)
        return moved_as_bytes(method or partial(self._meant, COLLECTIVES[collective]))

    def _meant(self, spec: CollectiveSpec, x: Tensor, axis: str, *options: Any, later: bool = False) -> Pending:
        """Gather all ranks' ``x``, and compute this rank's result from the collective's meaning."""
        group, meaning = self.axis[axis], spec.meaning
        assert meaning is not None, f"{spec.name} has neither a method nor a meaning"
        flat = x.contiguous().view(-1)
        gathered = group.all_gather(flat, flat.new_empty(group.size * flat.numel()), later)
        return lambda: meaning(gathered().view(group.size, *x.shape).unbind(), group.rank, *options[:-1])

    def _all_reduce(self, x: Tensor, axis: str, at: int, *, later: bool = False) -> Pending:
        return self.axis[axis].all_reduce(x.contiguous(), later)

    def _all_reduce_(self, x: Tensor, axis: str, at: int, *, later: bool = False) -> Pending:
        return self.axis[axis].add(x.contiguous(), later)

    def _all_gather(self, x: Tensor, axis: str, dim: int, parts: int, at: int, *, later: bool = False) -> Pending:
        group = self.axis[axis]
        if (runs := group.pieces(x, dim, parts)) is not None:
            whole = x.new_empty(_gathered_shape(x, group.size, dim))
            wait = group.all_gather_each(runs, whole.flatten(0, dim - 1).unbind(), later)
            return lambda: (wait(), whole)[1]
        out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        gathered = group.all_gather(x.contiguous(), out, later)
        if dim == 0 and parts == 1:
            return gathered
        return lambda: slices.unstack(gathered().view(group.size, *x.shape), dim, parts)

    def _gather_state(self, x: Tensor, axis: str, dim: int, parts: int, at: int, *, later: bool = False) -> Pending:
        wait = self._gather_states([x], axis, [dim], [parts], at, later=later)
        return lambda: wait()[0]

    def _gather_states(
        self,
        xs: Sequence[Tensor],
        axis: str,
        dims: Sequence[int],
        parts: Sequence[int],
        at: int,
        *,
        later: bool = False,
    ) -> Pending:
        results, wait = self.begin_gather(xs, axis, dims, parts, at)
        return lambda: (wait(), results)[1]

    def begin_gather(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
        group, cuts = self.axis[axis], list(zip(dims, parts, strict=True))
        inputs = [x.contiguous() for x in xs]
        stacked = [_room(x, group, cut == (0, 1)) for x, cut in zip(inputs, cuts, strict=True)]
        gathered = group.all_gather_each(inputs, stacked, True)
        results = tuple(
            stack if cut == (0, 1) else stack.new_empty(_gathered_shape(x, group.size, cut[0]))
            for x, stack, cut in zip(inputs, stacked, cuts, strict=True)
        )

        def wait() -> None:
            gathered()
            for x, stack, result, (dim, n) in zip(inputs, stacked, results, cuts, strict=True):
                if result is not stack:
                    by_rank = SHIPPED.unflatten(result, dim, (n, group.size, -1)).movedim(dim + 1, 0)
                    by_rank.copy_(SHIPPED.unflatten(stack.view(group.size, *x.shape), dim + 1, (n, -1)))

        return results, wait

    def _reduce_scatter(self, x: Tensor, axis: str, dim: int, parts: int, at: int, *, later: bool = False) -> Pending:
        group = self.axis[axis]
        if (runs := group.pieces(x, dim, parts)) is not None:
            part = x.new_empty((*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :]))
            wait = group.reduce_scatter_each(runs, part.flatten(0, dim - 1).unbind(), later)
            return lambda: (wait(), part)[1]
        stacked = slices.stack(x, dim, parts, group.size).contiguous()
        return group.reduce_scatter(stacked.flatten(0, 1), stacked.new_empty(stacked.shape[1:]), later)

    def _gather_together(
        self,
        xs: Sequence[Tensor],
        axis: str,
        dims: Sequence[int],
        parts: Sequence[int],
        at: int,
        *,
        later: bool = False,
    ) -> Pending:
        group = self.axis[axis]
        flat, size = SHIPPED.cat([x.reshape(-1) for x in xs]), group.size
        gathered = group.all_gather(flat, flat.new_empty(size * flat.numel()), later)
        shapes = [x.shape for x in xs]

        def unstack() -> tuple[Tensor, ...]:
            runs = gathered().view(size, -1).split_with_sizes([shape.numel() for shape in shapes], 1)
            return tuple(
                slices.unstack(run.view(size, *shape), dim, n)
                for shape, run, dim, n in zip(shapes, runs, dims, parts, strict=True)
            )

        return unstack

    def _scatter_together(
        self,
        xs: Sequence[Tensor],
        axis: str,
        dims: Sequence[int],
        parts: Sequence[int],
        at: int,
        *,
        later: bool = False,
    ) -> Pending:
        group = self.axis[axis]
        stacked = [slices.stack(x, dim, n, group.size) for x, dim, n in zip(xs, dims, parts, strict=True)]
        flat = SHIPPED.cat([x.reshape(group.size, -1) for x in stacked], 1)
        shapes = [x.shape[1:] for x in stacked]
        scattered = group.reduce_scatter(flat.view(-1), flat.new_empty(flat.shape[1]), later)

        def unstack() -> tuple[Tensor, ...]:
            runs = scattered().split_with_sizes([shape.numel() for shape in shapes])
            return tuple(run.view(shape) for run, shape in zip(runs, shapes, strict=True))

        return unstack

    def _all_to_all(
        self, x: Tensor, axis: str, dim: int, parts: int, to_dim: int, to_parts: int, at: int, *, later: bool = False
    ) -> Pending:
        group = self.axis[axis]
        if dim == to_dim:  # the same dim in other parts: rare
            whole = self._all_gather(x, axis, dim, parts, at, later=later)
            return lambda: slices.slice_of_rank(whole(), to_dim, to_parts, group.size, group.rank)
        outgoing = slices.stack(x, to_dim, to_parts, group.size).contiguous()
        moved = group.all_to_all(outgoing, SHIPPED.empty_like(outgoing), later)
        return lambda: slices.unstack(moved(), dim, parts)

    def _exchange_rows(
        self,
        x: Tensor,
        sends: list[int] | None,
        receives: list[int] | None,
        axis: str,
        at: int,
        *,
        later: bool = False,
    ) -> Pending:
        assert receives is not None
        out = x.new_empty((sum(receives), *x.shape[1:]))
        return self.axis[axis].all_to_all(x.contiguous(), out, later, receives, sends)

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        return self.axis[axis].permute(x.contiguous(), sources)

    def kernels(
        self, axis: str, device: torch.device, create: Callable[[dist.ProcessGroup, torch.device], T]
    ) -> T | None:
        if (axis, device, create) not in self.created:
            self.created[axis, device, create] = create(self.axis[axis].group, device)
        kernels: T = self.created[axis, device, create]
        return kernels

    # -- calls of the executor

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return self.group[ranks].add(x)

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        part = x.chunk(len(ranks))[ranks.index(self.rank)]
        return self.group[ranks].reduce_scatter(x, part, True)

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        dist.broadcast(x, src=source, group=self.group[ranks].group)
        return x

    def gather_parts(self, x: Tensor, ranks: tuple[int, ...], to: int) -> Pending:
        """Gather the ``x`` of ``ranks``, in their order, on the rank ``to``; return None on the others."""
        if len(ranks) == 1:
            return lambda: [x]
        parts = [SHIPPED.empty_like(x) for _ in ranks] if self.rank == to else None
        work = dist.gather(x, parts, dst=to, group=self.group[ranks].group, async_op=True)
        return pending(work, x, lambda: parts)

    def scatter_parts(self, parts: list[Tensor] | None, into: Tensor, ranks: tuple[int, ...], source: int) -> Pending:
        """Fill ``into`` with this rank's part of the ``parts`` on rank ``source``, in the order of ``ranks``."""
        if len(ranks) == 1:
            assert parts is not None
            return lambda: into.copy_(parts[0])
        work = dist.scatter(into, parts, src=source, group=self.group[ranks].group, async_op=True)
        return pending(work, parts, lambda: into)

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        x, connection = x.contiguous(), Connection(channel, self.rank, to)
        if (link := self.connections.link[connection]) is not None and link_can_send(x.shape, x.dtype, x.device):
            link.send_tensor(x)
            return lambda: x
        work = dist.isend(as_bytes(x), to, group=self.connections.group[connection])

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return x  # alive until sent

        return wait

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        device, connection = self._device(), Connection(channel, source, self.rank)
        if (link := self.connections.link[connection]) is not None and link_can_send(shape, dtype, device):
            return link.receive_next(shape, dtype, torch.clone)
        x = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(as_bytes(x), source, group=self.connections.group[connection])

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return x

        return wait

    def _device(self) -> torch.device:
        kind = self.devices.device_type
        return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def _gathered_shape(x: Tensor, size: int, dim: int) -> tuple[int, ...]:
    """Return the shape of ``size`` tensors like ``x``, joined along ``dim``."""
    return (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])


def _room(x: Tensor, group: Native, rows: bool) -> Tensor:
    """Return memory for all ranks' ``x``, one after the other: around ``x`` if its storage has room."""
    first, size = x.storage_offset() - group.rank * x.numel(), group.size * x.shape[0]
    if not rows or first < 0 or (first + group.size * x.numel()) * x.itemsize > x.untyped_storage().nbytes():
        return x.new_empty((size, *x.shape[1:]))
    return x.as_strided((size, *x.shape[1:]), x.stride(), first)


def gradient_groups(mesh: Mesh, axes: Iterable[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return all groups of ranks along each set of axes, in an order that every rank agrees on."""
    groups: dict[tuple[int, ...], None] = {}
    for names in sorted({tuple(sorted(names)) for names in axes}):
        for rank in range(mesh.size):
            groups[mesh.peers(rank, names)] = None
    return list(groups)
