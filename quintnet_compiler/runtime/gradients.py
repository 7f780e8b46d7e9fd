"""Gradients of one rank: accumulated over microbatches, added up over ranks (and scattered to those that store slices)
in buckets while the last backward runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..program import DistributedProgram, RankProgram, StateSpec
from ..sharding import R, Shard, local_shape
from .transport import Transport, Wait

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel: large enough for bandwidth, small enough to overlap


@dataclass(frozen=True)
class Cut:
    """How the ranks of ``axis`` slice a gradient (see :class:`..sharding.Shard`)."""

    axis: str
    ranks: int
    dim: int
    parts: int


@dataclass
class Bucket:
    """Gradients that settle together, in one flat buffer: first each rank of the axes ``scattered`` gets its run of the
    sum over them, then what it has (``own``; without such axes, all) is added up over the axes ``summed``.

    ``slots``: where each parameter's gradient is added up: in its own shape, or (where it has ``cuts``) with leading
    dims for the ranks that get slices. ``views``: what the rank has of it when it is settled.
    """

    summed: tuple[str, ...]
    scattered: tuple[str, ...]
    buffer: Tensor
    own: Tensor
    slots: dict[str, Tensor]
    cuts: dict[str, tuple[Cut, ...]]
    views: dict[str, Tensor]
    label: str
    left: int = 0
    wait: Wait | None = None


def reduced_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """The axes over ranks on which all of a parameter's gradient is a partial sum."""
    space = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in space if kind is R and axis.role != "time" and axis.size > 1)


def scattered_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """The axes over ranks that store slices of a parameter, and scatter its gradient at the end of a step."""
    return tuple(cut.axis for cut in _cuts(spec, program))


def _cuts(spec: StateSpec, program: DistributedProgram) -> tuple[Cut, ...]:
    kinds = zip(program.axes, spec.sharding, spec.accumulated, strict=True)
    return tuple(
        Cut(axis.name, axis.size, stored.dim, stored.parts)
        for axis, stored, accumulated in kinds
        if isinstance(stored, Shard) and accumulated is R
    )


def by_rank(x: Tensor, cuts: Sequence[Cut], order: Sequence[str]) -> Tensor:
    """Every rank's slice of ``x``: a leading dim for each cut, in ``order`` of their axes. A view where parts are 1."""
    for place, cut in enumerate(cuts):
        dim = cut.dim + place
        x = x.unflatten(dim, (cut.parts, cut.ranks, -1)).movedim(dim + 1, place)
        x = x.flatten(dim + 1, dim + 2)
    names = [cut.axis for cut in cuts]
    return x.permute(*(names.index(name) for name in order), *range(len(cuts), x.dim()))


def shared_by(spec: StateSpec, program: DistributedProgram, rank: int) -> tuple[int, ...]:
    """The ranks of all stages that hold the same part of a parameter as ``rank``."""
    here = program.mesh.coordinate(rank)
    owners = sorted({program.schedule.placement[stage] for stage in spec.stages})
    return tuple(program.mesh.rank({**here, "pp": owner}) for owner in owners) if len(owners) > 1 else ()


@dataclass
class GradientStore:
    """Holds, accumulates and settles the gradients of one rank's parameters."""

    program: DistributedProgram
    part: RankProgram
    transport: Transport
    device: torch.device
    buckets: list[Bucket] = field(default_factory=list)
    where: dict[str, Bucket] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.times: dict[str, int] = defaultdict(int)
        self.names: dict[str, str] = {}  # generated code names a parameter by its value in the graph
        groups: dict[tuple[torch.dtype, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
        for stage in self.part.stages:
            self.names |= stage.gradients
            for name in stage.gradients.values():
                spec = self.program.state[name]
                if not self.times[name]:
                    key = spec.dtype, reduced_axes(spec, self.program), scattered_axes(spec, self.program)
                    groups[key].append(name)
                self.times[name] += 1
        for (dtype, summed, scattered), names in groups.items():
            pending: list[str] = []
            size = 0
            for name in names:
                pending.append(name)
                size += self._shape(name).numel() * dtype.itemsize * self._ways(scattered)
                if size >= BUCKET_BYTES:
                    self._bucket(pending, dtype, summed, scattered)
                    pending, size = [], 0
            if pending:
                self._bucket(pending, dtype, summed, scattered)

    def _shape(self, name: str) -> torch.Size:
        """Of this rank's part of a parameter."""
        spec = self.program.state[name]
        return torch.Size(local_shape(spec.shape, spec.sharding, [axis.size for axis in self.program.axes]))

    def _ways(self, scattered: tuple[str, ...]) -> int:
        return math.prod(self.program.mesh[axis] for axis in scattered)

    def _bucket(
        self, names: list[str], dtype: torch.dtype, summed: tuple[str, ...], scattered: tuple[str, ...]
    ) -> None:
        mesh = self.program.mesh
        shapes = [self._shape(name) for name in names]
        sizes = [shape.numel() for shape in shapes]
        order = [name for name in mesh.names if name in scattered]  # in which ranks count
        buffer = torch.zeros(self._ways(scattered) * sum(sizes), dtype=dtype, device=self.device)
        rows = buffer.view(*(mesh[axis] for axis in order), sum(sizes))
        own = buffer.chunk(self._ways(scattered))[mesh.peers(self.part.rank, order).index(self.part.rank)]
        slots, cuts = {}, {}
        for name, part, shape in zip(names, rows.split(sizes, -1), shapes, strict=True):
            slots[name], cuts[name] = part.unflatten(-1, shape) if shape else part.squeeze(-1), ()
            if found := _cuts(self.program.state[name], self.program):
                cuts[name] = found
                if len(names) == len(found) == 1 and (found[0].dim, found[0].parts) == (0, 1):
                    slots[name], cuts[name] = slots[name].flatten(0, 1), ()  # the slices of all ranks, in order
        views = {
            name: part.view(shape) for name, part, shape in zip(names, own.split(sizes), shapes, strict=True)
        }
        over = ",".join((*scattered, *summed))
        label = f"gradients[{over}] {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        self.buckets.append(Bucket(summed, scattered, buffer, own, slots, cuts, views, label))
        self.where |= dict.fromkeys(names, self.buckets[-1])

    def begin(self) -> None:
        """A new step: forget the gradients of the last one."""
        self.fresh = set(self.where)
        for bucket in self.buckets:
            bucket.wait = None
            bucket.left = sum(self.times[name] for name in bucket.views) * self.program.schedule.num_microbatches

    def accumulate(self, gradient: Tensor, value: str) -> None:
        """Add one microbatch's gradient; with the last one of a bucket, its sum over ranks begins."""
        name = self.names[value]
        bucket = self.where[name]
        slot, cuts = bucket.slots[name], bucket.cuts[name]
        if cuts:
            gradient = by_rank(gradient, cuts, self._order(cuts))
        if name in self.fresh:
            self.fresh.remove(name)
            slot.copy_(gradient)
        else:
            slot.add_(gradient)
        self._count(bucket)

    def accumulate_product(self, left: Tensor, right: Tensor, value: str) -> None:
        """As ``accumulate(left @ right, value)``, without a copy."""
        name = self.names[value]
        bucket = self.where[name]
        slot, cuts = bucket.slots[name], bucket.cuts[name]
        if len(cuts) > 1 or any(cut.parts > 1 for cut in cuts):
            self.accumulate(left @ right, value)
            return
        for cut in cuts:  # each rank's rows or columns are a product of their own
            own = by_rank(left if cut.dim == 0 else right, cuts, [cut.axis])
            left, right = (own, right.expand(cut.ranks, -1, -1)) if cut.dim == 0 else (left.expand(cut.ranks, -1, -1), own)
        if name in self.fresh:
            self.fresh.remove(name)
            torch.matmul(left, right, out=slot)
        elif cuts:
            slot.baddbmm_(left, right)
        else:
            slot.addmm_(left, right)
        self._count(bucket)

    def _order(self, cuts: Sequence[Cut]) -> list[str]:
        names = {cut.axis for cut in cuts}
        return [name for name in self.program.mesh.names if name in names]

    def _count(self, bucket: Bucket) -> None:
        bucket.left -= 1
        if bucket.left == 0:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        peers, rank = self.program.mesh.peers, self.part.rank
        if bucket.scattered:
            bucket.wait = self.transport.start_scatter(bucket.buffer, peers(rank, bucket.scattered), bucket.label)
        elif bucket.summed:
            bucket.wait = self.transport.start_sum(bucket.buffer, peers(rank, bucket.summed), bucket.label)

    def settle(self) -> None:
        """Wait for all sums, and add up what stages share."""
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait()
            if bucket.scattered and bucket.summed:
                ranks = self.program.mesh.peers(self.part.rank, bucket.summed)
                self.transport.start_sum(bucket.own, ranks, bucket.label)()
        for name in sorted(self.where):
            ranks = shared_by(self.program.state[name], self.program, self.part.rank)
            if ranks:
                view = self.where[name].views[name]
                self.transport.start_sum(view, ranks, f"gradient of {name} over its stages")()

    @property
    def settled(self) -> Mapping[str, Tensor]:
        """Each parameter's gradient: this rank's part."""
        return {name: bucket.views[name] for name, bucket in self.where.items()}

    def screen(self) -> Tensor:
        """One number that is not finite if any element is not: cheap, and no host waits for it. A sum that
        overflows shows up too, so a hit must be confirmed."""
        sums = [bucket.own.sum().double() for bucket in self.buckets]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
