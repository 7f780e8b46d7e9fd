"""Buckets: flat buffers in which gradients of several parameters accumulate and are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.sharding import R, Shard, local_shape
from ...ir.distributed_program import DistributedProgram, StateSpec
from ..transport.transport import Wait

ALIGNMENT = 16  # bytes; kernels vectorize their reads and writes of views that begin at multiples of it


def aligned_count(count: int, dtype: torch.dtype) -> int:
    """Return ``count`` elements, rounded up so that the next view is aligned."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-count // step) * step


@dataclass(frozen=True)
class GradientSlice:
    """The slicing of a gradient over the ranks of ``axis`` (see :class:`...core.sharding.Shard`)."""

    axis: str
    ranks: int
    dim: int
    parts: int
    unit: int = 1


@dataclass
class Bucket:
    """Gradients in one flat buffer that are reduced together.

    They are reduce-scattered over the axes ``scattered`` (a rank then has ``own``; without such axes, all), and then
    all-reduced over the axes ``summed``.

    Attributes:
        summed: axes of the all-reduce.
        scattered: axes of the reduce-scatter.
        order: the scattered axes in the order of the mesh, which is that of ranks.
        buffer: where the gradients accumulate.
        own: this rank's part of the buffer.
        slots: where each parameter's gradient accumulates: in its own shape, or (where it has ``cuts``) with leading
            dims for the ranks that get slices. Each begins at a multiple of :data:`ALIGNMENT`.
        cuts: how each gradient is sliced.
        views: this rank's part of each reduced gradient.
        label: its name in messages.
        reduced: the dtype of the reduction.
        gaps: the buffer between the slots, zeros.
        moving: the buffer in the reduction's dtype, during the reduction.
        terms: the number of gradients that are accumulated in a step.
        left: the number of those that are still to come.
        wait: waits for the reduction.
        held: whether the buffer has memory for this step.
        stays: whether the buffer keeps its memory between steps.
        host: memory of the host to which ``own`` is copied after the reduction.
        total: the sum of the elements of ``own`` at that time.
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
    stays: bool = False
    host: Tensor | None = None
    total: Tensor | None = None

    @property
    def settled(self) -> Tensor:
        """Return the memory of its gradients between steps."""
        return self.own if self.host is None else self.host

    def on_host(self, host: Tensor) -> dict[str, Tensor]:
        """Let ``own`` be copied to ``host`` after the reduction, and return each parameter's view of it."""
        self.host, first = host, int(self.own.storage_offset())
        return {
            name: host.as_strided(x.shape, x.stride(), int(x.storage_offset()) - first)
            for name, x in self.views.items()
        }

    def allocate(self) -> None:
        """Allocate the buffer's memory again, for all views of it; only the gaps have values (zeros)."""
        if not self.stays:
            self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        for gap in self.gaps:
            gap.zero_()
        self.held = True

    def free_buffer(self) -> None:
        """Free the buffer's memory, after the last use of its gradients."""
        if not self.stays:
            self.buffer.untyped_storage().resize_(0)
        self.held = False

    def stay(self) -> None:
        """Keep the buffer's memory, which is allocated if it has none."""
        if not self.held:
            self.allocate()
        self.stays = True


def reduced_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """Return the axes over ranks on which the whole gradient of a parameter is a partial sum."""
    space = zip(program.axes, spec.sharding, strict=True)
    return tuple(axis.name for axis, kind in space if kind is R and axis.role != "time" and axis.size > 1)


def scattered_axes(spec: StateSpec, program: DistributedProgram) -> tuple[str, ...]:
    """Return the axes over ranks that store slices of a parameter, and reduce-scatter its gradient."""
    return tuple(cut.axis for cut in _cuts(spec, program))


def _cuts(spec: StateSpec, program: DistributedProgram) -> tuple[GradientSlice, ...]:
    kinds = zip(program.axes, spec.sharding, spec.accumulated, strict=True)
    return tuple(
        GradientSlice(axis.name, axis.size, stored.dim, stored.parts, stored.unit)
        for axis, stored, accumulated in kinds
        if isinstance(stored, Shard) and accumulated is R
    )


def accumulated_shape(spec: StateSpec, program: DistributedProgram) -> torch.Size:
    """Return the shape in which a rank accumulates a parameter's gradient."""
    return torch.Size(local_shape(spec.shape, spec.accumulated, [axis.size for axis in program.axes]))


def by_rank(x: Tensor, cuts: Sequence[GradientSlice], order: Sequence[str]) -> Tensor:
    """Return every rank's slice of ``x``, with a leading dim for each cut, in ``order`` of their axes.

    The result is a view where each cut has one part and divides its dim evenly; otherwise the last slices end in zeros.
    """
    for position, cut in enumerate(cuts):
        dim = cut.dim + position
        x = slices.extended(x, dim, cut.parts, Shard(dim, cut.parts, cut.unit).padded(x.shape[dim], cut.ranks))
        x = slices.stack(x, dim, cut.parts, cut.ranks)
    names = [cut.axis for cut in reversed(cuts)]
    return x.permute(*(names.index(name) for name in order), *range(len(cuts), x.dim()))


def _is_cut_by_rows(cuts: Sequence[GradientSlice]) -> bool:
    return len(cuts) == 1 and (cuts[0].dim, cuts[0].parts) == (0, 1)


def make_bucket(names: Sequence[str], program: DistributedProgram, rank: int, device: torch.device) -> Bucket:
    """Return the bucket of ``rank`` for parameters whose gradients are reduced over the same axes in the same dtype."""
    specs, mesh = {name: program.state[name] for name in names}, program.mesh
    first = specs[names[0]]
    summed, scattered = reduced_axes(first, program), scattered_axes(first, program)
    order = tuple(name for name in mesh.names if name in scattered)
    peers = mesh.peers(rank, order)
    ranks = [axis.size for axis in program.axes]
    shapes = {name: torch.Size(local_shape(spec.shape, spec.sharding, ranks)) for name, spec in specs.items()}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    padded_sizes = [aligned_count(size, first.summed) for size in sizes.values()]
    buffer = torch.empty(len(peers) * sum(padded_sizes), dtype=first.summed, device=device)
    own = buffer.view(len(peers), sum(padded_sizes))[peers.index(rank)]
    slots: dict[str, Tensor] = {}
    cuts: dict[str, tuple[GradientSlice, ...]] = {}
    gaps: list[Tensor] = []
    runs = SHIPPED.split(buffer.view(*(mesh[axis] for axis in order), sum(padded_sizes)), padded_sizes, -1)
    for (name, spec), padded in zip(specs.items(), runs, strict=True):
        run, gap = padded[..., : sizes[name]], padded[..., sizes[name] :]
        slots[name], cuts[name] = run.view((*run.shape[:-1], *shapes[name])), _cuts(spec, program)
        gaps += [gap] if gap.numel() else []
        if len(names) == 1 and not gap.numel() and _is_cut_by_rows(cuts[name]):
            # the slices of all ranks are contiguous and in order: they are the gradient itself
            rows = accumulated_shape(spec, program)[0]
            (slots[name], *after), cuts[name] = slots[name].flatten(0, 1).tensor_split([rows]), ()
            gaps += [gap for gap in after if gap.numel()]
    parts = zip(names, SHIPPED.split(own, padded_sizes), strict=True)
    views = {name: padded[: sizes[name]].view(shapes[name]) for name, padded in parts}
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    label = f"gradients[{','.join((*scattered, *summed))}] {names[0]}{others}"
    label += f" in {str(first.reduced).removeprefix('torch.')}"
    return Bucket(summed, scattered, order, buffer, own, slots, cuts, views, label, first.reduced, tuple(gaps))
