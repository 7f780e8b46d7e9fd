"""Private names of torch.distributed, for the runtime and checkpoints: no other package may import this module."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .interpreter import call_once

__all__ = [
    "PrefixStore",  # heartbeats and groups under names of their own; instead: torch.distributed.PrefixStore, untyped
    "Store",  # likewise
    "TCPStore",  # likewise
    "all_gather", "checkpoint_parts_by", "dtensor_operators", "dtensor_over", "flight_record", "interleaved_shard",
    "is_interleaved", "local_tensor", "positions_of", "reduce_scatter", "replace_local_tensor",
    "handle_dtensor_operators", "handled_by_torch", "save_state_dict",
    "store_of_world", "symmetric_matmuls", "timeout_of", "use_symmetric_memory",
    "wait_as_long",
]  # fmt: skip


def save_state_dict(*args: Any, **options: Any) -> Any:
    """Save as torch.distributed.checkpoint.save does, without its warning where one process is alone.

    Filters of warnings are the process's, and a thread that saves must not change them.
    """
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict  # 165 modules

    return _save_state_dict(*args, **options)


# torch 2.13 renamed these two; the names before it are deprecated
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# This rank's part, without autograd; instead: DTensor.to_local. Hot: each step reads it with map().
local_tensor: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")


def replace_local_tensor(x: DTensor, part: Tensor) -> None:
    """Put ``x`` over the memory of ``part``; instead: a new parameter, which optimizers would have to be given."""
    x._local_tensor = part


def dtensor_over(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return a DTensor over ``part`` where it lies; instead: ``DTensor.from_local``, which moves it.

    That may be the host, whatever kind of device ``mesh`` names, as FSDP2 keeps offloaded parameters.
    """
    if part.device.type == mesh.device_type or part.is_meta:
        x: DTensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        return x
    untyped: Any = DTensor
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, stride, part.dtype))
    x = untyped(part, spec, requires_grad=False)
    return x


def interleaved_shard(dim: int, parts: int, units: int = 0) -> Placement:
    """Return the placement of a packed weight (query, key and value) of whose ``parts`` each rank has a slice.

    Instead: one parameter per part. ``units``: so many in each part, which ranks have whole (heads that do not divide);
    instead: nothing, torch's placements cut single indices.

    The upper 32 bits of the split factor say the units, times the parts. torch copies the factor to the placements of
    operators' results, so they say it, too.
    """
    _redistribute_interleaved()
    if units:
        _split_in_units()
    return _StridedShard(dim, split_factor=parts * (1 + (units << 32)))


def _parts_and_units(placement: Any) -> tuple[int, int]:
    units, parts = divmod(placement.split_factor, 1 << 32)
    return parts, units // parts


@call_once
def _split_in_units() -> None:
    """Make torch cut and join DTensors in whole units where a split factor says so, from now on."""
    kind: Any = _StridedShard
    split, joined = kind._split_tensor, kind._to_replicate_tensor

    def split_tensor(self: Any, x: Tensor, ranks: int, *, with_padding: bool = True, contiguous: bool = True) -> Any:
        parts, units = _parts_and_units(self)
        if not units:
            return split(self, x, ranks, with_padding=with_padding, contiguous=contiguous)
        size = x.shape[self.dim]
        if size % (parts * units):
            raise ValueError(f"dim {self.dim} of {list(x.shape)} is not made of {parts} x {units} units")
        view, most = torch.unflatten(x, self.dim, (parts, units, size // (parts * units))), -(-units // ranks)
        ends = [min(most * rank, units) for rank in range(ranks + 1)]
        shards = [view.narrow(self.dim + 1, a, b - a).flatten(self.dim, self.dim + 2) for a, b in pairwise(ends)]
        shards = [shard.contiguous() for shard in shards] if contiguous else shards
        padding = [shards[0].shape[self.dim] - shard.shape[self.dim] for shard in shards] if with_padding else []
        for rank, count in enumerate(padding):
            shape = [*x.shape[: self.dim], count, *x.shape[self.dim + 1 :]]
            shards[rank] = torch.cat([shards[rank], x.new_zeros(shape)], self.dim) if count else shards[rank]
        return shards, padding

    def to_replicate(self: Any, part: Tensor, mesh: Any, axis: int, shape: Any) -> Any:
        if _parts_and_units(self)[1]:
            whole = torch.empty(list(shape), device="meta")
            own = split_tensor(self, whole, mesh.size(axis), with_padding=False)[0][mesh.get_local_rank(axis)]
            if own.shape[self.dim] != part.shape[self.dim]:
                raise RuntimeError(f"{self} of {list(shape)} is {list(own.shape)} here, and not {list(part.shape)}")
        return joined(self, part, mesh, axis, shape)

    kind._split_tensor, kind._to_replicate_tensor = split_tensor, to_replicate


@call_once
def _redistribute_interleaved() -> None:
    """Make torch take such a placement for what it says where it is no order of mesh axes.

    torch raises there (2.11), or plans without the sizes that earlier axes leave: ``full_tensor`` raises or gives wrong
    numbers where two axes split one dim (2.12 and 2.13). Instead: ``use_strided_shard_as_shard_order=False`` in every
    DTensorSpec, operators' results too.
    """
    spec: Any = DTensorSpec
    as_order = spec._normalize_placements_into_shard_order

    def normalize(placements: Any, mesh: Any, use_strided_shard_as_shard_order: bool = True) -> Any:
        try:
            return as_order(placements, mesh, use_strided_shard_as_shard_order)
        except ValueError:
            return as_order(placements, mesh, False)

    spec._normalize_placements_into_shard_order = staticmethod(normalize)


def positions_of(x: DTensor, places: Sequence[int] | None = None) -> list[Tensor]:
    """Return for each dim the global indices [local size] (int64) of this rank's part, as the placements cut them.

    ``places``: coordinates in the mesh of another rank, whose part is meant. Instead:
    ``compute_local_shape_and_global_offset``, which gives the first of each dim's indices.
    """
    indices = [torch.arange(size) for size in x.shape]
    if places is None:
        places = x.device_mesh.get_coordinate() or [0] * x.device_mesh.ndim
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = indices[placement.dim].view(*[1] * placement.dim, -1)
            cut: Any = placement._split_tensor(whole, x.device_mesh.size(axis), with_padding=False, contiguous=True)
            indices[placement.dim] = cut[0][places[axis]].flatten()
    return indices


def is_interleaved(x: DTensor) -> bool:
    """Return whether a placement of ``x`` may leave this rank several runs of indices."""
    return any(isinstance(placement, _StridedShard) for placement in x.placements)


@call_once
def checkpoint_parts_by(part: Callable[[DTensor], Any]) -> None:
    """Make torch.distributed.checkpoint ask ``part`` where a rank's part of a DTensor lies (None: as torch says).

    torch takes every part for one box that begins at its first index, and so reads and writes other elements where a
    part is several boxes. Instead: nothing, state dicts of optimizers are torch's own DTensors.
    """
    kind: Any = DTensor
    write, chunks, shard = kind.__create_write_items__, kind.__create_chunk_list__, kind.__get_tensor_shard__

    def write_items(x: DTensor, fqn: str, value: Any) -> Any:
        boxes = part(x)
        return write(x, fqn, value) if boxes is None else boxes.__create_write_items__(fqn, value)

    def chunk_list(x: DTensor) -> Any:
        boxes = part(x)
        return chunks(x) if boxes is None else boxes.__create_chunk_list__()

    def tensor_shard(x: DTensor, index: Any) -> Any:
        boxes = part(x)
        return shard(x, index) if boxes is None else boxes.box(index)

    kind.__create_write_items__, kind.__create_chunk_list__ = write_items, chunk_list
    kind.__get_tensor_shard__ = tensor_shard


def dtensor_operators() -> dict[Any, Callable[..., Any]]:
    """Return what computes operators of DTensors, by operator; instead: nothing, DTensors are torch's own."""
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


class _LeftOut(threading.local):
    """The operators that a thread computes as torch does at the moment."""

    operators: frozenset[Any] = frozenset()


class _DispatcherOfThreads(type(DTensor._op_dispatcher)):  # type: ignore[misc]
    """Is torch's dispatcher of operators of DTensors, whose handlers each thread may leave out for itself."""

    handlers: dict[Any, Callable[..., Any]]
    left_out: _LeftOut
    remaining: dict[tuple[Any, ...], dict[Any, Callable[..., Any]]]

    @property
    def _custom_op_handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return the handlers of this thread; torch asks for them, and for a dict, at each operator."""
        operators, handlers = self.left_out.operators, self.handlers
        if not operators:
            return handlers
        key = (id(handlers), len(handlers), operators)
        if key not in self.remaining:
            self.remaining[key] = {name: handler for name, handler in handlers.items() if name not in operators}
        return self.remaining[key]

    @_custom_op_handlers.setter
    def _custom_op_handlers(self, handlers: dict[Any, Callable[..., Any]]) -> None:
        self.handlers = handlers


def handle_dtensor_operators(handlers: Mapping[Any, Callable[..., Any]]) -> None:
    """Let functions compute operators of DTensors from now on; instead: a subclass of DTensor."""
    dispatcher: Any = DTensor._op_dispatcher
    if not isinstance(dispatcher, _DispatcherOfThreads):
        current = dispatcher.__dict__.pop("_custom_op_handlers")
        vars(dispatcher).update(handlers=current, left_out=_LeftOut(), remaining={})
        dispatcher.__class__ = _DispatcherOfThreads
    dispatcher.handlers.update(handlers)
    dispatcher.remaining.clear()


@contextlib.contextmanager
def handled_by_torch(operator: Any) -> Iterator[None]:
    """Let torch compute an operator of DTensors in this thread, while inside; instead: no handler for any thread."""
    left_out = DTensor._op_dispatcher.left_out  # type: ignore[attr-defined]
    outside, left_out.operators = left_out.operators, left_out.operators | {operator}
    try:
        yield
    finally:
        left_out.operators = outside


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the seconds that ranks of a group wait for each other; instead: none, ``init_process_group`` keeps it."""
    backends: str = dist.get_backend_config(group)
    kinds = [part.partition(":")[0] for part in backends.split(",")]
    options: Any = getattr(_backend_of(group, "cpu" if "cpu" in kinds else kinds[0]), "options", None)
    return float((options._timeout if options is not None else dist.default_pg_timeout).total_seconds())


def wait_as_long(group: dist.ProcessGroup, seconds: float) -> None:
    """Let ranks of ``group`` wait for each other for so long; instead: the ``timeout`` of ``new_group``, for groups
    that a DeviceMesh does not make. gloo and NCCL can be told; other backends keep what they have."""
    backends: str = dist.get_backend_config(group)
    for part in backends.split(","):
        backend: Any = _backend_of(group, part.partition(":")[0])
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timedelta(seconds=seconds))


def _backend_of(group: dist.ProcessGroup, kind: str) -> Any:
    """Return the backend of a group for a kind of device; None: the group is written in Python, and has none."""
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


def store_of_world() -> Any:
    """Return the store of the default process group, with its prefix; None if it does not run over TCP.

    Instead: nothing, a second store would need a port that all ranks know.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return store if isinstance(inner, TCPStore) else None


def use_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Let ranks of ``group`` read each other's memory; instead: nothing, the ring of this package needs none."""
    importlib.import_module("torch.distributed._symmetric_memory").enable_symm_mem_for_group(group.group_name)


def symmetric_matmuls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the fused all-gather and matmul, and matmul and reduce-scatter; instead: nothing, as above."""
    importlib.import_module("torch.distributed._symmetric_memory")  # defines them
    ops = torch.ops.symm_mem
    return ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter


def flight_record() -> bytes | None:
    """Return the flight record of NCCL's process groups as JSON: the last collectives; None where there is none.

    Instead: nothing, stacks tell where the host is.
    """
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    record = None if dump is None else dump(True, False)
    if record is None:
        return None
    text = record if isinstance(record, bytes) else str(record).encode()
    return text if b'"entries":[{' in text.replace(b" ", b"") else None
