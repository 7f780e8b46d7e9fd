"""The ``comm`` object of generated code: a transport's collectives, and operators that depend on the rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.mesh import Mesh
from ...core.precision import times, widened
from ...core.rng import DISTRIBUTIONS, AnyKey, Key, keep_mask
from ...core.sharding import Shard
from ...ops.attention.blocks import Sight
from ...ops.attention.operator import IDS
from ...ops.attention.tiled import attend_runs, attend_runs_backward
from ...ops.attention.tiles import AttentionInputs, AttentionTiles, Ids
from ...ops.collectives import COLLECTIVES
from ...ops.extensions import extension_of_method
from ..state.gradients import GradientStore
from ..transport.host_copies import HostCopies
from ..transport.ring import POSITIONS, Circle, Ring, ring_backward, ring_forward, runs_of
from ..transport.run_exchange import RunExchange
from ..transport.token_dispatch import Router
from ..transport.transport import Pending, Transport
from .extensions import RankMethod, Services, methods_of


class Comm:
    """One rank's communication, slices, random masks and gradients.

    The executor sets ``seed``, ``step``, ``scale`` and ``keys`` for each step, ``microbatch`` (the coordinate on the
    time axis) before each function. ``at`` in all methods is the call's index in ``DistributedProgram.sites``.
    """

    def __init__(
        self,
        transport: Transport,
        mesh: Mesh,
        coordinate: Mapping[str, int],
        gradients: GradientStore | None = None,
        services: Services = MappingProxyType({}),
    ) -> None:
        router = Router(transport, mesh)
        runs = RunExchange(transport, mesh, coordinate)
        composed = {*vars(type(self)), *vars(Router), *vars(RunExchange)}  # not collectives of the transport itself
        for name, collective in COLLECTIVES.items():
            if name not in composed:
                setattr(self, name, partial(transport.run, name))
                if collective.start is not None:
                    setattr(self, f"start_{name}", partial(transport.start, name))
        self.dispatch_plan, self.dispatch, self.combine = router.dispatch_plan, router.dispatch, router.combine
        self.start_dispatch, self.start_combine = router.start_dispatch, router.start_combine
        self.send_runs, self.return_runs = runs.send_runs, runs.return_runs
        self.start_send_runs, self.start_return_runs = runs.start_send_runs, runs.start_return_runs
        self.copies = copies = HostCopies() if gradients is None else gradients.outward
        self.copy_out, self.start_copy_out = copies.copy_out, copies.start_copy_out
        self.copy_in, self.start_copy_in = copies.copy_in, copies.start_copy_in
        # what is written to a disk stays in memory, unless a service has one
        self.write_out, self.start_write_out = self.copy_out, self.start_copy_out
        self.read_in, self.start_read_in = self.copy_in, self.start_copy_in
        for name, method in methods_of(services).items():
            setattr(self, name, method)
        if gradients is not None:
            self.accumulate = gradients.accumulate
            self.accumulate_matmul = gradients.accumulate_matmul
        self.transport, self.mesh, self.coordinate = transport, mesh, coordinate
        self.seed = self.step = self.microbatch = 0
        self.scale: float | Tensor = 1.0
        self.keys: Callable[[int, int, int], AnyKey] = Key
        self.under_way: dict[int, tuple[Tensor, Callable[[], Any]]] = {}  # by id() of the gathered tensor
        self.shared: dict[Hashable, Any] = {}  # what the layers of a function share of operators of features
        self.ids: dict[tuple[int, ...], Ids] = {}  # by id() of the tensors: the layers of a function share them

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return what carries out an operator of a feature."""
        method = extension_of_method(name, RankMethod)
        if method is None or method.service is not None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return partial(method.run, self)

    def gather_early(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        """Start an all-gather of several parameters in one message; :meth:`arrived` waits for its results."""
        gathered, wait = self.transport.begin_gather(xs, axis, dims, parts, at)
        wait = cache(wait)
        self.under_way.update((id(x), (x, wait)) for x in gathered)
        return gathered

    def arrived(self, x: Tensor, at: int) -> Tensor:
        """Return ``x`` after waiting for the all-gather that fills it."""
        if id(x) in self.under_way:
            self.under_way.pop(id(x))[1]()
        return x

    def wait_for_gathers(self) -> None:
        """Wait for all-gathers that nothing has read, so that their memory may be reused."""
        for _, wait in self.under_way.values():
            wait()
        self.under_way.clear()

    def wait(self, pending: Pending, at: int) -> Any:
        """Return the result of a collective that was started, after waiting for it."""
        return pending()

    def loss_scale(self, x: Tensor, at: int) -> Tensor:
        """Return ``x`` times this step's loss scale."""
        return times(x, self.scale)

    def shard_slice(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        """Return this rank's slice of a value that is replicated over the axis."""
        return slices.slice_of_rank(x, dim, parts, self.mesh[axis], self.coordinate[axis])

    def shard_pad(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        """Return the transpose of ``shard_slice``: zeros at the slices of other ranks."""
        return slices.pad(x, dim, parts, self.mesh[axis], self.coordinate[axis])

    def embedding_rows(
        self, weight: Tensor, ids: Tensor, padding_idx: int, axes: Sequence[str], sizes: Sequence[int], at: int
    ) -> Tensor:
        """Look ``ids`` up in this rank's rows of a table; zeros for other ranks' rows, so that the sum is the lookup.

        Shapes: ``weight`` [rows, width], ``ids`` [...]; returns [..., width].
        """
        local, outside = self._rows(ids, weight.shape[0], axes, sizes)
        return SHIPPED.embedding(weight, local).masked_fill_(outside.unsqueeze(-1), 0.0)

    def embedding_rows_backward(
        self, grad: Tensor, ids: Tensor, rows: int, padding_idx: int, axes: Sequence[str], sizes: Sequence[int], at: int
    ) -> Tensor:
        """Return the gradient of this rank's rows, [rows, width]; that of the padding row is zero."""
        local, outside = self._rows(ids, rows, axes, sizes)
        outside = outside | (ids == padding_idx) if padding_idx >= 0 else outside
        own_grad = grad.masked_fill(outside.unsqueeze(-1), 0.0)
        return torch.ops.aten.embedding_dense_backward(own_grad, local, rows, -1, False)  # type: ignore[no-any-return]

    def local_experts(
        self, ids: Tensor, experts: int, axes: Sequence[str], sizes: Sequence[int], hot: Sequence[int], at: int
    ) -> Tensor:
        """Return expert ``ids`` relative to this rank's first expert, and -1 for those that other ranks compute.

        Hot experts, which every rank computes, are numbered after this rank's own. Ids of ``experts`` and more (no
        expert) become -1, too.
        """
        num_local = experts
        for size in sizes:
            num_local = -(-num_local // size)
        local, outside = self._rows(ids, num_local, axes, sizes)
        local = local.masked_fill(outside | (ids >= experts), -1)
        for row, expert in enumerate(hot, num_local):
            local = local.masked_fill(ids == expert, row)
        return local

    def nll_terms(self, logits: Tensor, labels: Tensor, axes: Sequence[str], sizes: Sequence[int], at: int) -> Tensor:
        """Return this rank's terms of a cross entropy over split classes, [1, 3, rows].

        They are, for each row: the largest logit, the sum of exponentials relative to it, and the label's logit (0
        where another rank has it).
        """
        local, outside = self._rows(labels, logits.shape[1], axes, sizes)
        picked = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill_(outside, 0.0)
        # all classes of a rank may be masked with -inf
        top = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
        wide = widened(logits.dtype)
        total = (logits - top).exp_().sum(1, dtype=wide)
        return SHIPPED.stack([top.squeeze(1).to(wide), total, picked.to(wide)]).unsqueeze(0)

    def nll_terms_backward(
        self,
        grad: Tensor,
        logits: Tensor,
        terms: Tensor,
        labels: Tensor,
        axes: Sequence[str],
        sizes: Sequence[int],
        at: int,
    ) -> Tensor:
        """Return the gradient of this rank's logits, from that of the terms."""
        local, outside = self._rows(labels, logits.shape[1], axes, sizes)
        _, total, picked = grad[0].to(logits.dtype).unsqueeze(-1).unbind(0)
        softmax = (logits - terms[0, 0].to(logits.dtype).unsqueeze(-1)).exp_().mul_(total)
        return softmax.scatter_add_(1, local.unsqueeze(1), picked.masked_fill(outside.unsqueeze(1), 0.0))

    def _rows(self, ids: Tensor, rows: int, axes: Sequence[str], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ``ids`` as indices of this rank's rows or classes, 0 elsewhere, and the mask of other ranks' ids."""
        local = ids - self.part_index(axes, sizes) * rows
        outside = (local < 0) | (local >= rows)
        return local.masked_fill_(outside, 0), outside

    def part_index(self, axes: Sequence[str], sizes: Sequence[int]) -> int:
        """Return the index of this rank's part of a dim that ``axes`` split, the outermost first."""
        index = 0
        for axis, size in zip(axes, sizes, strict=True):
            index = index * size + self.coordinate.get(axis, self.microbatch)
        return index

    def rows_of(
        self,
        x: Tensor,
        dim: int,
        whole: int,
        axes: Sequence[str],
        sizes: Sequence[int],
        parts: Sequence[int],
        units: Sequence[int],
        at: int,
    ) -> Tensor:
        """Return the global positions of this rank's part of a dim."""
        return self._positions([whole], axes, sizes, [0] * len(axes), parts, units, x.device)[0]

    def padding_of(
        self,
        size: int,
        whole: int,
        axes: Sequence[str],
        sizes: Sequence[int],
        parts: Sequence[int],
        units: Sequence[int],
        device: torch.device,
        at: int,
    ) -> Tensor:
        """Return a mask that is true where this rank's part of a dim is padding."""
        kinds = tuple(Shard(0, count, unit) for count, unit in zip(parts, units, strict=True))
        coordinates = [self.coordinate.get(axis, self.microbatch) for axis in axes]
        return slices.positions([whole], kinds, sizes, coordinates, device)[0] < 0

    def ring_attention(self, q: Tensor, axis: str, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Compute ring attention over ``axis``: see :mod:`..transport.ring`."""
        inputs = AttentionInputs(q, k, v, self._read(*options[: len(IDS)]))
        return ring_forward(self._ring(q, axis, *options[len(IDS) :]), inputs)

    def ring_attention_backward(
        self, grad: Tensor, axis: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of ``ring_attention``."""
        inputs = AttentionInputs(q, k, v, self._read(*options[: len(IDS)]))
        return ring_backward(self._ring(q, axis, *options[len(IDS) :]), inputs, grad, out, lse)

    def _read(self, padding: Tensor | None, segments: Tensor | None, groups: Tensor | None) -> Ids:
        """Return the ids that decide which positions attend to which; one object for equal tensors."""
        return self.ids.setdefault((id(padding), id(segments), id(groups)), Ids(padding, segments, groups))

    def _ring(
        self, q: Tensor, axis: str, plan: Tensor | None, scale: float, mask: str, tile_bytes: int, at: int
    ) -> Ring:
        tiles, size = AttentionTiles(scale, Sight.parse(mask), tile_bytes), self.mesh[axis]
        runs = runs_of(plan, size, q.shape[POSITIONS])
        return Ring(self.transport, axis, size, self.coordinate[axis], at, tiles, runs)

    def tiled_attention(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """Compute attention of this rank's positions to all: see :mod:`quintnet_compiler.ops.attention.tiled`."""
        return attend_runs(
            *self._runs(*options[len(IDS) :]), AttentionInputs(q, k, v, self._read(*options[: len(IDS)]))
        )

    def tiled_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of ``tiled_attention``."""
        inputs = AttentionInputs(q, k, v, self._read(*options[: len(IDS)]))
        return attend_runs_backward(*self._runs(*options[len(IDS) :]), inputs, grad, out, lse)

    def _runs(
        self,
        scale: float,
        mask: str,
        tile_bytes: int,
        whole: int,
        axes: Sequence[str],
        sizes: Sequence[int],
        parts: Sequence[int],
        at: int,
    ) -> tuple[AttentionTiles, list[tuple[int, int]]]:
        """Return the tiles' settings, and this rank's runs (begin, end) of positions."""
        coordinates = [self.coordinate.get(axis, self.microbatch) for axis in axes]
        return AttentionTiles(scale, Sight.parse(mask), tile_bytes), slices.runs(whole, parts, sizes, coordinates)

    def circle(self, axis: str, at: int) -> Circle:
        """Return this rank's place among those of an axis, for call ``at``."""
        return Circle(self.transport, axis, self.mesh[axis], self.coordinate[axis], at)

    def keep_mask(
        self,
        x: Tensor,
        p: float,
        op: int,
        whole: Sequence[int],
        axes: Sequence[str],
        sizes: Sequence[int],
        dims: Sequence[int],
        parts: Sequence[int],
        units: Sequence[int],
        at: int,
    ) -> Tensor:
        """Return the mask of elements of ``x`` that a dropout keeps: the same on every layout.

        ``x`` is this rank's part of a value of shape ``whole``.
        """
        positions = self._positions(whole, axes, sizes, dims, parts, units, x.device)
        return keep_mask(positions, whole, p, self.keys(self.seed, self.step, op))

    def local_noise(
        self,
        size: Sequence[int],
        kind: str,
        op: int,
        dtype: torch.dtype,
        device: torch.device,
        whole: Sequence[int],
        axes: Sequence[str],
        sizes: Sequence[int],
        dims: Sequence[int],
        parts: Sequence[int],
        units: Sequence[int],
        at: int,
    ) -> Tensor:
        """Return this rank's part of random numbers of shape ``whole``: the same on every layout."""
        positions = self._positions(whole, axes, sizes, dims, parts, units, device)
        return DISTRIBUTIONS[kind](positions, whole, self.keys(self.seed, self.step, op), dtype)

    def _positions(
        self,
        whole: Sequence[int],
        axes: Sequence[str],
        sizes: Sequence[int],
        dims: Sequence[int],
        parts: Sequence[int],
        units: Sequence[int],
        device: torch.device,
    ) -> list[Tensor]:
        """Return the global positions, by dim, of this rank's part of a value of shape ``whole``.

        Those of padding are clamped to 0: nothing reads the values computed there.
        """
        kinds = tuple(Shard(dim, count, unit) for dim, count, unit in zip(dims, parts, units, strict=True))
        coordinates = [self.coordinate.get(axis, self.microbatch) for axis in axes]
        positions = slices.positions(whole, kinds, sizes, coordinates, device)
        return [x.clamp_(min=0) for x in positions]
