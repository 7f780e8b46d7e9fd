"""Gradients of one rank: accumulated over microbatches, added up over ranks in buckets while the last backward runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..program import DistributedProgram, RankProgram, StateSpec
from ..sharding import R, local_shape
from .transport import Transport, Wait

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel: large enough for bandwidth, small enough to overlap


@dataclass
class Bucket:
    """Gradients that are added up together: one flat buffer, a view per parameter."""

    axes: tuple[str, ...]
    buffer: Tensor
    views: dict[str, Tensor]
    label: str
    left: int = 0
    wait: Wait | None = None


def reduced_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """The axes over ranks on which a parameter's gradient is a partial sum."""
    space = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in space if kind is R and axis.role != "time" and axis.size > 1)


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
        groups: dict[tuple[torch.dtype, tuple[str, ...]], list[str]] = defaultdict(list)
        for stage in reversed(self.part.stages):  # the later one's gradients are complete first
            self.names |= stage.gradients
            for name in stage.gradients.values():
                spec = self.program.state[name]
                if not self.times[name]:
                    groups[spec.dtype, reduced_axes(spec, self.program)].append(name)
                self.times[name] += 1
        for (dtype, axes), names in groups.items():
            pending: list[str] = []
            size = 0
            for name in names:
                pending.append(name)
                size += self._shape(name).numel() * dtype.itemsize
                if size >= BUCKET_BYTES:
                    self._bucket(pending, dtype, axes)
                    pending, size = [], 0
            if pending:
                self._bucket(pending, dtype, axes)

    def _shape(self, name: str) -> torch.Size:
        spec = self.program.state[name]
        return torch.Size(local_shape(spec.shape, spec.sharding, [axis.size for axis in self.program.axes]))

    def _bucket(self, names: list[str], dtype: torch.dtype, axes: tuple[str, ...]) -> None:
        shapes = [self._shape(name) for name in names]
        buffer = torch.zeros(sum(s.numel() for s in shapes), dtype=dtype, device=self.device)
        parts = torch.split(buffer, [s.numel() for s in shapes])
        views = {name: part.view(size) for name, part, size in zip(names, parts, shapes, strict=True)}
        label = f"gradients[{','.join(axes)}] {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        self.buckets.append(Bucket(axes, buffer, views, label))
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
        view = bucket.views[name]
        if name in self.fresh:
            self.fresh.remove(name)
            view.copy_(gradient)
        else:
            view.add_(gradient)
        self._count(bucket)

    def accumulate_product(self, left: Tensor, right: Tensor, value: str) -> None:
        """As ``accumulate(left @ right, value)``, without a copy."""
        name = self.names[value]
        bucket = self.where[name]
        view = bucket.views[name]
        if name in self.fresh:
            self.fresh.remove(name)
            torch.mm(left, right, out=view)
        else:
            view.addmm_(left, right)
        self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        bucket.left -= 1
        if bucket.left == 0 and bucket.axes:
            ranks = self.program.mesh.peers(self.part.rank, bucket.axes)
            bucket.wait = self.transport.start_sum(bucket.buffer, ranks, bucket.label)

    def settle(self) -> None:
        """Wait for all sums, and add up what stages share."""
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait()
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
        sums = [bucket.buffer.sum().double() for bucket in self.buckets]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
