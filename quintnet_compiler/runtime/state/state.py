"""Parameters as DTensors under their original names, and their parts on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ...compat.distributed import dtensor_over, interleaved_shard, local_tensor, replace_local_tensor
from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.sharding import Shard as ShardType
from ...core.sharding import Sharding, local_shape, shard_shape
from ...ir.distributed_program import DistributedProgram, RankProgram, StateSpec
from ...ir.program import Axis

T = TypeVar("T", bound=Tensor)


def part_of(x: Tensor, sharding: Sharding, axes: Sequence[Axis], coordinate: Mapping[str, int]) -> Tensor:
    """Return a rank's part of a whole tensor. The microbatch axis never shards state or inputs."""
    coordinates = [coordinate.get(axis.name, 0) for axis in axes]
    return slices.take_all(x, sharding, [axis.size for axis in axes], coordinates)


def new_caches(
    program: DistributedProgram, part: RankProgram, pages: int, old: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return a rank's caches with ``pages`` pages: those of ``old``, then zeros."""
    sizes = [axis.size for axis in program.axes]
    names = dict.fromkeys(name for stage in part.stages for name in stage.state.values())
    caches: dict[str, Tensor] = {}
    for spec in map(program.state.__getitem__, names):
        if spec.kind == "cache":
            pools, _, *page = local_shape(spec.shape, spec.sharding, sizes)
            caches[spec.name] = SHIPPED.zeros(pools, pages, *page, dtype=spec.dtype, device=device)
            if spec.name in old:
                caches[spec.name][:, : old[spec.name].shape[1]] = old[spec.name]
    return caches


def placements(spec: StateSpec, axes: Sequence[Axis], mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the DTensor placements on ``mesh`` (the ranks of one stage)."""
    kinds: dict[str, Placement] = {}
    shape: tuple[int, ...] = spec.shape
    for axis, kind in zip(axes, spec.sharding, strict=True):
        if isinstance(kind, ShardType):
            kinds[axis.name] = _placement(kind, shape[kind.dim], axis.size)
        shape = shard_shape(shape, kind, axis.size)
    return tuple(kinds.get(name, Replicate()) for name in mesh.mesh_dim_names or ())


def _placement(kind: ShardType, size: int, ranks: int) -> Placement:
    """Return the placement of a dim of ``size``; in units only where single indices would be split differently."""
    if kind.padded(size, ranks) != replace(kind, unit=1).padded(size, ranks):
        return interleaved_shard(kind.dim, kind.parts, size // (kind.parts * kind.unit))
    return Shard(kind.dim) if kind.parts == 1 else interleaved_shard(kind.dim, kind.parts)


def sharded_dtensor(local: Tensor, spec: StateSpec, axes: Sequence[Axis], mesh: DeviceMesh) -> DTensor:
    """Return this rank's part of a parameter or gradient, without padding, as a DTensor over the ranks of its stage.

    The part keeps its memory; one on the host stays there.
    """
    stride = torch.empty(spec.shape, device="meta").stride()
    return without_offset(dtensor_over(local, mesh, placements(spec, axes, mesh), torch.Size(spec.shape), stride))


def without_offset(x: T) -> T:
    """Return the same part in a DTensor without storage offset.

    torch 2.13 takes a DTensor with an offset for one that owns its storage, and ``copy.deepcopy``, ``pickle`` and
    ``dcp.async_save`` fail to copy that.
    """
    if not isinstance(x, DTensor) or not local_tensor(x).storage_offset():
        return x
    part, mesh, shape = local_tensor(x), x.device_mesh, x.shape
    first = part.detach().as_strided(part.shape, part.stride(), 0)  # the beginning of that memory
    result = dtensor_over(first, mesh, x.placements, shape, x.stride())
    replace_local_tensor(result, part)
    return result  # type: ignore[return-value]
