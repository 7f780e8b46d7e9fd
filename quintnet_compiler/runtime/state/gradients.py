"""Gradients of one rank: accumulated over microbatches, and reduced over ranks in buckets during the last backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ...compat.torch import foreach_copy_, foreach_mul_
from ...compat.torch_codegen import SHIPPED
from ...core.precision import times
from ...ir.distributed_program import DistributedProgram, RankProgram, StateSpec
from ..transport.host_copies import HostCopies, host_room
from ..transport.transport import Pending, Transport
from .buckets import Bucket, GradientSlice, accumulated_shape, by_rank, make_bucket, reduced_axes, scattered_axes
from .products import add_product, adds_up, put_product

# buckets that no ranks reduce: several, so that their memory is allocated bit by bit while the backward frees values
PIECES = 16  # at most
PIECE_BYTES = 2**20  # of each, at least
MAX_LASTING = 4  # programs (sizes of batches, say) whose gradients have memory at once, because graphs write it


def shared_by(spec: StateSpec, program: DistributedProgram, rank: int) -> tuple[int, ...]:
    """Return the ranks of all stages that hold the same part of a parameter as ``rank``; none for a single stage."""
    coordinate = program.mesh.coordinate(rank)
    owners = sorted({program.schedule.placement[stage] for stage in spec.stages})
    return tuple(program.mesh.rank({**coordinate, "pp": owner}) for owner in owners) if len(owners) > 1 else ()


def too_many_gradients(stores: Mapping[int, GradientStore | None]) -> list[int]:
    """Return the keys of other programs whose gradients stay in memory, but for the newest ones that may."""
    keys = [key for key, store in stores.items() if store is not None and store.stays]
    return keys[: max(0, len(keys) - (MAX_LASTING - 1))]


@dataclass(slots=True)
class _Sum:
    """The accumulated gradient of one parameter.

    Attributes:
        bucket: its bucket.
        slot: its place in the bucket.
        cuts: see :class:`Bucket`.
        takes_products: whether matrix products can be added to the slot directly, one or one for each rank.
        step: the last step that accumulated something.
    """

    bucket: Bucket
    slot: Tensor
    cuts: tuple[GradientSlice, ...]
    takes_products: bool
    step: int = 0


class SumKernels(Protocol):
    """Add gradients to sums, in place of torch's ``copy_`` and ``add_``; results are equal bit by bit."""

    def set_sum(self, slot: Tensor, gradient: Tensor) -> None:
        """Set ``slot`` to ``gradient``, of the same shape."""
        ...

    def add_to_sum(self, slot: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` to ``slot``, of the same shape."""
        ...


@dataclass
class GradientStore:
    """Accumulates and reduces the gradients of one rank's parameters.

    Gradients of offloaded parameters are copied to the host: a bucket when its last term is added, or (if ranks reduce
    it) after the reduction. Its memory on the device is freed when the next bucket is copied.

    Attributes:
        kernels: what adds gradients to the sums; None for torch's own.
        buckets: of all parameters.
        where: the bucket of each parameter.
        settled: this rank's part of each parameter's reduced gradient.
        outward: copies to the host.
        leaving: the bucket that is being copied to the host, and what waits for the copy.
        stays: whether its memory is never freed, because graphs write there.
    """

    program: DistributedProgram
    part: RankProgram
    transport: Transport
    device: torch.device
    kernels: SumKernels | None = None
    buckets: list[Bucket] = field(default_factory=list)
    where: dict[str, Bucket] = field(default_factory=dict)
    settled: dict[str, Tensor] = field(default_factory=dict)
    outward: HostCopies = field(default_factory=HostCopies)
    leaving: tuple[Bucket, Pending] | None = None
    stays: bool = False

    def __post_init__(self) -> None:
        """Allocate the buckets."""
        self.times: dict[str, int] = defaultdict(int)  # how many functions accumulate a parameter's gradient
        self.names: dict[str, str] = {}  # the parameter of each value that generated code accumulates
        self.step = 0
        self.scale: float | Tensor | None = None
        # torch's own are called directly: each call of Python costs as much as a kernel's launch
        self._put: Callable[[Tensor, Tensor], object] = Tensor.copy_ if self.kernels is None else self.kernels.set_sum
        self._add: Callable[[Tensor, Tensor], object] = Tensor.add_ if self.kernels is None else self.kernels.add_to_sum
        for names in self._groups():
            for bucket_names in self._split(names):
                self.buckets.append(make_bucket(bucket_names, self.program, self.part.rank, self.device))
                self.where |= dict.fromkeys(bucket_names, self.buckets[-1])
        for bucket in self.buckets:
            bucket.terms = sum(self.times[name] for name in bucket.views) * self.program.schedule.num_microbatches
        sums = {name: _sum(bucket, name) for name, bucket in self.where.items()}
        self.sums = {value: sums[name] for value, name in self.names.items()}
        self._settle_views(self._views())
        owners = {name: shared_by(self.program.state[name], self.program, self.part.rank) for name in self.where}
        self.shared = {name: ranks for name, ranks in sorted(owners.items()) if ranks}
        self.idle = [bucket for bucket in self.buckets if not bucket.terms]
        for bucket in self.buckets if self.host else ():
            bucket.total = SHIPPED.zeros((), dtype=bucket.own.dtype, device=self.device)
            bucket.free_buffer()

    def _groups(self) -> list[list[str]]:
        """Return parameters whose gradients can share buckets, and count who accumulates them."""
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for stage in reversed(self.part.stages):  # a later stage's gradients are complete first
            self.names |= stage.gradients
            for name in stage.gradients.values():
                spec = self.program.state[name]
                if not self.times[name]:
                    axes = reduced_axes(spec, self.program), scattered_axes(spec, self.program)
                    groups[spec.summed, spec.reduced, *axes].append(name)
                self.times[name] += 1
        for name in self._idle():
            spec = self.program.state[name]
            groups["idle", spec.summed, spec.reduced].append(name)
        return list(groups.values())

    def _split(self, names: list[str]) -> Iterator[list[str]]:
        """Yield the parameters of each bucket of a group."""
        first = self.program.state[names[0]]
        sizes = {name: self._bytes(self.program.state[name]) for name in names}
        limit = self.program.bucket_mib * 2**20
        if not reduced_axes(first, self.program) and not scattered_axes(first, self.program):
            limit = min(limit, max(PIECE_BYTES, sum(sizes.values()) // PIECES))
        pending: list[str] = []
        size = 0
        for name in names:
            pending.append(name)
            size += sizes[name]
            if size >= limit or name is names[-1]:
                yield pending
                pending, size = [], 0

    def _views(self) -> dict[str, Tensor]:
        """Return each parameter's reduced gradient, on the device or the host, in the dtype of sums."""
        views: dict[str, Tensor] = {}
        for bucket in self.buckets:
            if self.program.state[next(iter(bucket.views))].host:
                views |= bucket.on_host(host_room(bucket.own.shape, bucket.own.dtype, self.device))
            else:
                views |= bucket.views
        return views

    def _settle_views(self, views: dict[str, Tensor]) -> None:
        """Set ``settled``: the views, or copies where sums have more bits than the parameter."""
        for name, view in views.items():
            self.settled[name] = view.to(self.program.state[name].dtype)
        copied = [name for name, view in views.items() if self.settled[name].dtype is not view.dtype]
        self.copies = [self.settled[name] for name in copied], [views[name] for name in copied]

    @property
    def host(self) -> bool:
        """Return whether gradients are offloaded to the host."""
        return any(bucket.host is not None for bucket in self.buckets)

    def _bytes(self, spec: StateSpec) -> int:
        return accumulated_shape(spec, self.program).numel() * spec.summed.itemsize

    def stay(self) -> None:
        """Allocate all memory of gradients, and keep it at its place in every later step."""
        self.stays = True
        for bucket in self.buckets:
            bucket.stay()
        for copy in self.copies[0]:
            copy.untyped_storage().resize_(copy.nbytes)

    def begin(self, scale: float | Tensor | None = None) -> None:
        """Begin a step: free the gradients of the last one. ``scale``: the loss scale, by which sums are divided."""
        self.step += 1
        self.scale = scale
        if self.leaving is not None:
            self._arrive()
        for bucket in self.buckets:
            bucket.wait = None
            bucket.left = bucket.terms
            bucket.free_buffer()
        for bucket in self.idle:
            bucket.allocate()
            bucket.buffer.zero_()

    def free_memory(self) -> None:
        """Free all memory until the next step, after the last use of the gradients."""
        for bucket in self.buckets:
            bucket.free_buffer()
        for copy in self.copies[0] if not self.stays else ():
            copy.untyped_storage().resize_(0)

    def _idle(self) -> list[str]:
        """Return parameters that get a gradient only in stages of other ranks: this rank takes part in their sum."""
        own_stages = {stage.index for stage in self.part.stages}
        trained = {name for stage in self.program.stages for name in stage.gradients.values()}
        shared = {name for name in trained if not own_stages.isdisjoint(self.program.state[name].stages)}
        return sorted(shared - self.times.keys())

    def accumulate(self, gradient: Tensor, value: str) -> None:
        """Add one microbatch's gradient; the last one of a bucket starts its reduction."""
        target = self.sums[value]
        if target.cuts:
            gradient = by_rank(gradient, target.cuts, target.bucket.order)
        if target.step == self.step:
            self._add(target.slot, gradient)
        else:
            self._first(target)
            self._put(target.slot, gradient)
        self._count(target.bucket)

    def accumulate_matmul(self, left: Tensor, right: Tensor, value: str) -> None:
        """Do ``accumulate(left @ right, value)`` without a copy or (see :mod:`.products`) an intermediate rounding."""
        target = self.sums[value]
        if not (target.takes_products and adds_up(target.slot, left)):
            self.accumulate(left @ right, value)
            return
        if target.cuts:  # one product for each rank's rows or columns
            rows, order = target.cuts[0].dim == 0, target.bucket.order
            left = by_rank(left, target.cuts, order) if rows else left.expand(target.cuts[0].ranks, -1, -1)
            right = right.expand(target.cuts[0].ranks, -1, -1) if rows else by_rank(right, target.cuts, order)
        if target.step == self.step:
            add_product(target.slot, left, right)
        else:
            self._first(target)
            put_product(target.slot, left, right)
        self._count(target.bucket)

    def _first(self, target: _Sum) -> None:
        target.step = self.step
        if not target.bucket.held:
            target.bucket.allocate()

    def _count(self, bucket: Bucket) -> None:
        bucket.left -= 1
        if bucket.left == 0:
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        if self._is_complete(bucket):
            self._leave(bucket)
        peers, rank = self.program.mesh.peers, self.part.rank
        begin = self.transport.start_scatter if bucket.scattered else self.transport.start_sum
        axes = bucket.scattered or bucket.summed
        if axes:
            bucket.moving = bucket.buffer.to(bucket.reduced)
            bucket.wait = begin(bucket.moving, peers(rank, axes), bucket.label)

    def _is_complete(self, bucket: Bucket) -> bool:
        """Return whether an offloaded bucket needs no reduction before it is copied to the host."""
        unreduced = not bucket.scattered and not bucket.summed and self.shared.keys().isdisjoint(bucket.views)
        return bucket.host is not None and unreduced

    def _leave(self, bucket: Bucket) -> None:
        """Start copying a reduced bucket to the host, and finish the copy of the one before."""
        assert bucket.host is not None
        if self.scale is not None:
            self._unscale([bucket.own], self.scale)
        SHIPPED.sum(bucket.own, 0, out=bucket.total)
        wait = self.outward.start_into(bucket.host, bucket.own)
        self._arrive()
        self.leaving = bucket, wait

    def _arrive(self) -> None:
        if self.leaving is not None:
            bucket, wait = self.leaving
            wait()
            bucket.free_buffer()
            self.leaving = None

    def require_all(self) -> None:
        """Assert that every gradient was accumulated: memory without a term has no values."""
        for bucket in self.buckets:
            assert bucket.left == 0, f"{bucket.label}: {bucket.left} terms are missing"

    def settle(self) -> None:
        """Finish all reductions, add up what stages share, and divide by the loss scale.

        Copies to the host may still be in progress afterwards.
        """
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
        elif self.scale is not None:
            self._unscale([bucket.own for bucket in self.buckets], self.scale)
        if self.copies[0]:
            self.outward.wait_for_copies()
            for copy in self.copies[0] if not self.stays else ():
                copy.untyped_storage().resize_(copy.nbytes)
            foreach_copy_(*self.copies)

    def _unscale(self, sums: list[Tensor], scale: float | Tensor) -> None:
        """Divide sums of gradients by the loss scale."""
        if isinstance(scale, Tensor):
            for x in sums:
                x.copy_(times(x, 1 / scale))
        else:
            foreach_mul_(sums, 1 / scale)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.wait is not None and bucket.moving is not None
        total = bucket.wait()
        if bucket.scattered:
            index = self.program.mesh.peers(self.part.rank, bucket.order).index(self.part.rank)
            total = bucket.moving.view(-1, bucket.own.numel())[index]
            if bucket.summed:
                ranks = self.program.mesh.peers(self.part.rank, bucket.summed)
                self.transport.start_sum(total, ranks, bucket.label)()
        _keep(bucket.own, total)
        bucket.moving = bucket.wait = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all gradients between steps: of sums, and of copies in another dtype."""
        sums = (bucket.buffer if bucket.host is None else bucket.host for bucket in self.buckets)
        return sum(x.nbytes for x in sums) + sum(x.nbytes for x in self.copies[0])

    def screen(self) -> Tensor:
        """Return 0, or NaN if any element may not be finite, without synchronizing with the host.

        The check adds all elements up; a sum of finite ones may overflow, so NaN must be confirmed.
        """
        sums = [bucket.own.sum() if bucket.total is None else bucket.total for bucket in self.buckets]
        if len(sums) == 1:
            return sums[0] * 0
        return SHIPPED.stack([x.double() for x in sums]).sum() * 0 if sums else SHIPPED.zeros((), dtype=torch.float64)


def _sum(bucket: Bucket, name: str) -> _Sum:
    cuts = bucket.cuts[name]
    return _Sum(bucket, bucket.slots[name], cuts, len(cuts) < 2 and all(cut.parts == 1 for cut in cuts))


def _keep(slot: Tensor, result: Tensor) -> None:
    """Copy a result of another dtype to ``slot``; one of the same dtype is there already."""
    if result.dtype is not slot.dtype:
        slot.copy_(result.view_as(slot))
