"""Gradients of one rank: accumulated over microbatches, added up over ranks (and scattered to those that store slices)
in buckets while the last backward runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...compat.torch import foreach_copy_, foreach_mul_
from ...ir.distributed_program import DistributedProgram, RankProgram, StateSpec
from ..transport.host_copies import HostCopies, host_room
from ..transport.transport import Pending, Transport
from .buckets import Bucket, GradientSlice, accumulated_shape, by_rank, make_bucket, reduced_axes, scattered_axes
from .products import add_product, adds_up, put_product

PIECES, PIECE_BYTES = 16, 2**20  # of what no ranks add up (at most so many, of so many bytes at least): its memory is
# taken piece by piece, as the backward frees values


def shared_by(spec: StateSpec, program: DistributedProgram, rank: int) -> tuple[int, ...]:
    """The ranks of all stages that hold the same part of a parameter as ``rank``."""
    here = program.mesh.coordinate(rank)
    owners = sorted({program.schedule.placement[stage] for stage in spec.stages})
    return tuple(program.mesh.rank({**here, "pp": owner}) for owner in owners) if len(owners) > 1 else ()


@dataclass(slots=True)
class _Sum:
    """Where the gradient of one parameter adds up: in ``slot`` of ``bucket`` (see there for ``cuts``). ``matrices``:
    whether products can be added there, one or one for each rank. ``step``: the last one that added something."""

    bucket: Bucket
    slot: Tensor
    cuts: tuple[GradientSlice, ...]
    matrices: bool
    step: int = 0


@dataclass
class GradientStore:
    """Holds, accumulates and settles the gradients of one rank's parameters. What a step has to do with each of them is
    found here once; between microbatches, its Python is as long for a thousand parameters as for one.

    Gradients of parameters that are on the host go there: a bucket when its last term is added, or (if ranks add it
    up) when that is settled. Its memory on the device is free when the next one leaves."""

    program: DistributedProgram
    part: RankProgram
    transport: Transport
    device: torch.device
    buckets: list[Bucket] = field(default_factory=list)
    where: dict[str, Bucket] = field(default_factory=dict)
    settled: dict[str, Tensor] = field(default_factory=dict)  # each parameter's gradient: this rank's part
    outward: HostCopies = field(default_factory=HostCopies)
    leaving: tuple[Bucket, Pending] | None = None  # on its way to the host

    def __post_init__(self) -> None:
        self.times: dict[str, int] = defaultdict(int)
        self.names: dict[str, str] = {}  # generated code names a parameter by its value in the graph
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for stage in reversed(self.part.stages):  # the later one's gradients are complete first
            self.names |= stage.gradients
            for name in stage.gradients.values():
                spec = self.program.state[name]
                if not self.times[name]:
                    over = reduced_axes(spec, self.program), scattered_axes(spec, self.program)
                    groups[spec.summed, spec.reduced, *over].append(name)
                self.times[name] += 1
        for name in self._idle():
            spec = self.program.state[name]
            groups["idle", spec.summed, spec.reduced].append(name)
        for names in groups.values():
            pending: list[str] = []
            first, size = self.program.state[names[0]], 0
            sizes = {name: self._bytes(self.program.state[name]) for name in names}
            alone = not reduced_axes(first, self.program) and not scattered_axes(first, self.program)
            few = max(PIECE_BYTES, sum(sizes.values()) // PIECES)
            limit = min(self.program.bucket_mib * 2**20, few) if alone else self.program.bucket_mib * 2**20
            for name in names:
                pending.append(name)
                size += sizes[name]
                if size >= limit or name is names[-1]:
                    self.buckets.append(make_bucket(pending, self.program, self.part.rank, self.device))
                    self.where |= dict.fromkeys(pending, self.buckets[-1])
                    pending, size = [], 0
        for bucket in self.buckets:
            bucket.terms = sum(self.times[name] for name in bucket.views) * self.program.schedule.num_microbatches
        self.step = 0
        made = {name: _sum(bucket, name) for name, bucket in self.where.items()}
        self.sums = {value: made[name] for value, name in self.names.items()}
        views: dict[str, Tensor] = {}
        for bucket in self.buckets:
            host = self.program.state[next(iter(bucket.views))].host
            room = host_room(bucket.own.shape, bucket.own.dtype, self.device) if host else None
            views |= bucket.views if room is None else bucket.on_host(room)
        for name, view in views.items():  # where sums have more bits than the parameter, a copy
            self.settled[name] = view.to(self.program.state[name].dtype)
        copied = [name for name, view in views.items() if self.settled[name].dtype is not view.dtype]
        self.copies = [self.settled[name] for name in copied], [views[name] for name in copied]
        owners = {name: shared_by(self.program.state[name], self.program, self.part.rank) for name in self.where}
        self.shared = {name: ranks for name, ranks in sorted(owners.items()) if ranks}
        self.idle = [bucket for bucket in self.buckets if not bucket.terms]
        self.scale = 1.0
        for bucket in self.buckets if self.host else ():
            bucket.total = torch.zeros((), dtype=bucket.own.dtype, device=self.device)
            bucket.release()

    @property
    def host(self) -> bool:
        """Whether gradients go to the host."""
        return any(bucket.host is not None for bucket in self.buckets)

    def _bytes(self, spec: StateSpec) -> int:
        return accumulated_shape(spec, self.program).numel() * spec.summed.itemsize

    def begin(self, scale: float = 1.0) -> None:
        """A new step: forget the gradients of the last one, whose memory is free until the backward. ``scale``: what
        they are divided by when they are settled."""
        self.step += 1
        self.scale = scale
        self._arrive()
        for bucket in self.buckets:
            bucket.wait = None
            bucket.left = bucket.terms
            bucket.release()
        for bucket in self.idle:
            bucket.hold()
            bucket.buffer.zero_()

    def release(self) -> None:
        """Give all memory back until the next step: nobody has its gradients any more."""
        for bucket in self.buckets:
            bucket.release()
        for copy in self.copies[0]:
            copy.untyped_storage().resize_(0)

    def _idle(self) -> list[str]:
        """Parameters that stages here use without a gradient, and other stages with one: its sum arrives here too."""
        here = {stage.index for stage in self.part.stages}
        trained = {name for stage in self.program.stages for name in stage.gradients.values()}
        held = {name for name in trained if not here.isdisjoint(self.program.state[name].stages)}
        return sorted(held - self.times.keys())

    def accumulate(self, gradient: Tensor, value: str) -> None:
        """Add one microbatch's gradient; with the last one of a bucket, its sum over ranks begins."""
        to = self.sums[value]
        if to.cuts:
            gradient = by_rank(gradient, to.cuts, to.bucket.order)
        if to.step == self.step:
            to.slot.add_(gradient)
        else:
            self._first(to)
            to.slot.copy_(gradient)
        self._count(to.bucket)

    def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
        """As ``accumulate(left @ right, value)``, without a copy, and (see :mod:`.products`) not rounded on its way."""
        to = self.sums[value]
        if not (to.matrices and adds_up(to.slot, left)):
            self.accumulate(left @ right, value)
            return
        if to.cuts:  # each rank's rows or columns are a product of their own
            rows, order = to.cuts[0].dim == 0, to.bucket.order
            left = by_rank(left, to.cuts, order) if rows else left.expand(to.cuts[0].ranks, -1, -1)
            right = right.expand(to.cuts[0].ranks, -1, -1) if rows else by_rank(right, to.cuts, order)
        if to.step == self.step:
            add_product(to.slot, left, right)
        else:
            self._first(to)
            put_product(to.slot, left, right)
        self._count(to.bucket)

    def _first(self, to: _Sum) -> None:
        to.step = self.step
        if not to.bucket.held:
            to.bucket.hold()

    def _count(self, bucket: Bucket) -> None:
        bucket.left -= 1
        if bucket.left == 0:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._settles_at_once(bucket):
            self._leave(bucket)
        peers, rank = self.program.mesh.peers, self.part.rank
        begin = self.transport.start_scatter if bucket.scattered else self.transport.start_sum
        axes = bucket.scattered or bucket.summed
        if axes:
            bucket.moving = bucket.buffer.to(bucket.reduced)
            bucket.wait = begin(bucket.moving, peers(rank, axes), bucket.label)

    def _settles_at_once(self, bucket: Bucket) -> bool:
        """Whether what is added up here is all, and goes to the host."""
        alone = not bucket.scattered and not bucket.summed and self.shared.keys().isdisjoint(bucket.views)
        return bucket.host is not None and alone

    def _leave(self, bucket: Bucket) -> None:
        """Copy what is settled to the host, and have the copy before end."""
        assert bucket.host is not None
        if self.scale != 1:
            bucket.own.mul_(1 / self.scale)
        torch.sum(bucket.own, 0, out=bucket.total)
        wait = self.outward.start_into(bucket.host, bucket.own)
        self._arrive()
        self.leaving = bucket, wait

    def _arrive(self) -> None:
        if self.leaving is not None:
            bucket, wait = self.leaving
            wait()
            bucket.release()
            self.leaving = None

    def require_all(self) -> None:
        """Memory of gradients has no values before the first term of each."""
        for bucket in self.buckets:
            assert bucket.left == 0, f"{bucket.label}: {bucket.left} terms are missing"

    def settle(self) -> None:
        """Wait for all sums, add up what stages share, and divide by the step's scale. Of what goes to the host, the
        copies are under way then."""
        for bucket in self.buckets:
            if bucket.wait is not None:
                self._finish(bucket)
        for name, ranks in self.shared.items():
            view = self.where[name].views[name]
            moving = view.to(self.where[name].reduced)
            self.transport.start_sum(moving, ranks, f"gradient of {name} over its stages")()
            _keep(view, moving)
        if self.host:
            for bucket in self.buckets:
                if bucket.held and (self.leaving is None or self.leaving[0] is not bucket):
                    self._leave(bucket)
            self._arrive()
        elif self.scale != 1:
            foreach_mul_([bucket.own for bucket in self.buckets], 1 / self.scale)
        if self.copies[0]:
            self.outward.settle()
            for copy in self.copies[0]:
                copy.untyped_storage().resize_(copy.nbytes)
            foreach_copy_(*self.copies)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.wait is not None and bucket.moving is not None
        found = bucket.wait()
        if bucket.scattered:
            index = self.program.mesh.peers(self.part.rank, bucket.order).index(self.part.rank)
            found = bucket.moving.view(-1, bucket.own.numel())[index]
            if bucket.summed:
                ranks = self.program.mesh.peers(self.part.rank, bucket.summed)
                self.transport.start_sum(found, ranks, bucket.label)()
        _keep(bucket.own, found)
        bucket.moving = bucket.wait = None

    @property
    def nbytes(self) -> int:
        """Of all sums where they stay, and of what is not a view of them."""
        sums = (bucket.buffer if bucket.host is None else bucket.host for bucket in self.buckets)
        return sum(x.nbytes for x in sums) + sum(x.nbytes for x in self.copies[0])

    def screen(self) -> Tensor:
        """0, or NaN if any element is not finite: cheap, and no host waits for it. A sum that overflows shows up too,
        so a hit must be confirmed."""
        sums = [bucket.own.sum() if bucket.total is None else bucket.total for bucket in self.buckets]
        if len(sums) == 1:
            return sums[0] * 0
        return torch.stack([x.double() for x in sums]).sum() * 0 if sums else torch.zeros((), dtype=torch.float64)


def _sum(bucket: Bucket, name: str) -> _Sum:
    cuts = bucket.cuts[name]
    return _Sum(bucket, bucket.slots[name], cuts, len(cuts) < 2 and all(cut.parts == 1 for cut in cuts))


def _keep(slot: Tensor, found: Tensor) -> None:
    """Put in ``slot`` what another dtype keeps from lying there already."""
    if found.dtype is not slot.dtype:
        slot.copy_(found.view_as(slot))
