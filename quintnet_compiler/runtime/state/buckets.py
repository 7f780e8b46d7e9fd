"""Flat buffers in which gradients of several parameters add up and settle together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import slices
from ...core.sharding import R, Shard, local_shape
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..transport.transport import Wait

ALIGNMENT = 16  # bytes: kernels read and write so many at once where views begin at multiples of it


def aligned(count: int, dtype: torch.dtype) -> int:
    """Room for ``count`` elements behind which the next view is aligned."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-count // step) * step


@dataclass(frozen=True)
class GradientSlice:
    """How the ranks of ``axis`` slice a gradient (see :class:`...core.sharding.Shard`)."""

    axis: str
    ranks: int
    dim: int
    parts: int
    unit: int = 1


@dataclass
class Bucket:
    """Gradients that settle together, in one flat buffer: first each rank of the axes ``scattered`` gets its run of the
    sum over them, then what it has (``own``; without such axes, all) is added up over the axes ``summed``.

    All of them begin at multiples of :data:`ALIGNMENT`; the ``gaps`` between them are zeros.

    ``order``: the scattered axes as the mesh has them, in which order ranks count.
    ``slots``: where each parameter's gradient is added up: in its own shape, or (where it has ``cuts``) with leading
    dims for the ranks that get slices. ``views``: what the rank has of it when it is settled. ``reduced``: the dtype in
    which ranks add up; ``moving``: what they do it with, while they do. ``terms``: how often something is added in a
    step; ``left``: how often still. ``host``: memory of the host to which ``own`` goes when it is settled;
    ``total``: the sum of its elements then.
    """

    summed: tuple[str, ...]
    scattered: tuple[str, ...]
    order: tuple[str, ...]
    buffer: Tensor
    own: Tensor
    slots: dict[str, Tensor]
    cuts: dict[str, tuple[GradientSlice, ...]]
    views: dict[str, Tensor]
    label: str
    reduced: torch.dtype
    gaps: tuple[Tensor, ...] = ()
    moving: Tensor | None = None
    terms: int = 0
    left: int = 0
    wait: Wait | None = None
    held: bool = True
    host: Tensor | None = None
    total: Tensor | None = None

    @property
    def settled(self) -> Tensor:
        """Where its gradients are between steps."""
        return self.own if self.host is None else self.host

    def on_host(self, host: Tensor) -> dict[str, Tensor]:
        """From now on ``host`` is where ``own`` goes: what each parameter has of it."""
        self.host, first = host, int(self.own.storage_offset())
        return {
            name: host.as_strided(x.shape, x.stride(), int(x.storage_offset()) - first)
            for name, x in self.views.items()
        }

    def hold(self) -> None:
        """Give the buffer memory again, without values but for the gaps; all views of it have it then."""
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        for gap in self.gaps:
            gap.zero_()
        self.held = True

    def release(self) -> None:
        """Give the buffer's memory back: nobody has its gradients any more."""
        self.buffer.untyped_storage().resize_(0)
        self.held = False


def reduced_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """The axes over ranks on which all of a parameter's gradient is a partial sum."""
    space = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in space if kind is R and axis.role != "time" and axis.size > 1)


def scattered_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """The axes over ranks that store slices of a parameter, and scatter its gradient at the end of a step."""
    return tuple(cut.axis for cut in _cuts(spec, program))


def _cuts(spec: StateSpec, program: DistributedProgram) -> tuple[GradientSlice, ...]:
    kinds = zip(program.axes, spec.sharding, spec.accumulated, strict=True)
    return tuple(
        GradientSlice(axis.name, axis.size, stored.dim, stored.parts, stored.unit)
        for axis, stored, accumulated in kinds
        if isinstance(stored, Shard) and accumulated is R
    )


def accumulated_shape(spec: StateSpec, program: DistributedProgram) -> torch.Size:
    """Of what a rank adds up of a parameter's gradient."""
    return torch.Size(local_shape(spec.shape, spec.accumulated, [axis.size for axis in program.axes]))


def by_rank(x: Tensor, cuts: Sequence[GradientSlice], order: Sequence[str]) -> Tensor:
    """Every rank's slice of ``x``: a leading dim for each cut, in ``order`` of their axes. A view where parts are 1 and
    divide; where they do not, the last slices end in zeros."""
    for place, cut in enumerate(cuts):
        dim = cut.dim + place
        x = slices.extended(x, dim, cut.parts, Shard(dim, cut.parts, cut.unit).padded(x.shape[dim], cut.ranks))
        x = slices.stack(x, dim, cut.parts, cut.ranks)
    names = [cut.axis for cut in reversed(cuts)]
    return x.permute(*(names.index(name) for name in order), *range(len(cuts), x.dim()))


def make_bucket(names: Sequence[str], program: DistributedProgram, rank: int, device: torch.device) -> Bucket:
    """A bucket for parameters whose gradients settle in the same way and dtypes, on ``rank``."""
    specs, mesh = {name: program.state[name] for name in names}, program.mesh
    first = specs[names[0]]
    summed, scattered = reduced_axes(first, program), scattered_axes(first, program)
    order = tuple(name for name in mesh.names if name in scattered)
    peers = mesh.peers(rank, order)
    ranks = [axis.size for axis in program.axes]
    shapes = {name: torch.Size(local_shape(spec.shape, spec.sharding, ranks)) for name, spec in specs.items()}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    rooms = [aligned(size, first.summed) for size in sizes.values()]
    buffer = torch.empty(len(peers) * sum(rooms), dtype=first.summed, device=device)
    own = buffer.view(len(peers), sum(rooms))[peers.index(rank)]
    slots: dict[str, Tensor] = {}
    cuts: dict[str, tuple[GradientSlice, ...]] = {}
    gaps: list[Tensor] = []
    runs = torch.split(buffer.view(*(mesh[axis] for axis in order), sum(rooms)), rooms, -1)
    for (name, spec), room in zip(specs.items(), runs, strict=True):
        run, gap = room[..., : sizes[name]], room[..., sizes[name] :]
        slots[name], cuts[name] = run.view((*run.shape[:-1], *shapes[name])), _cuts(spec, program)
        gaps += [gap] if gap.numel() else []
        whole = len(names) == 1 and not gap.numel()
        if whole and len(cuts[name]) == 1 and (cuts[name][0].dim, cuts[name][0].parts) == (0, 1):
            rows = accumulated_shape(spec, program)[0]  # the slices of all ranks, in order
            (slots[name], *behind), cuts[name] = slots[name].flatten(0, 1).tensor_split([rows]), ()
            gaps += [gap for gap in behind if gap.numel()]
    places = zip(names, torch.split(own, rooms), strict=True)
    views = {name: room[: sizes[name]].view(shapes[name]) for name, room in places}
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    label = f"gradients[{','.join((*scattered, *summed))}] {names[0]}{more}"
    label += f" in {str(first.reduced).removeprefix('torch.')}"
    return Bucket(summed, scattered, order, buffer, own, slots, cuts, views, label, first.reduced, tuple(gaps))
