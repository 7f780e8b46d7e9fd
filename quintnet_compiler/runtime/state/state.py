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
from ...core import slices
from ...core.sharding import Shard as ShardType
from ...core.sharding import Sharding, local_shape, shard_shape
from ...ir.distributed_program import DistributedProgram, RankProgram, StateSpec
from ...ir.program import Axis

T = TypeVar("T", bound=Tensor)


def part_of(x: Tensor, sharding: Sharding, axes: Sequence[Axis], coordinate: Mapping[str, int]) -> Tensor:
    """A rank's part of a whole tensor. The microbatch axis never shards state or inputs."""
    places = [coordinate.get(axis.name, 0) for axis in axes]
    return slices.take_all(x, sharding, [axis.size for axis in axes], places)


def new_caches(
    program: DistributedProgram, part: RankProgram, pages: int, old: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """What a rank's stages keep from one run to the next: ``pages`` pages, zeros behind those of ``old``."""
    sizes = [axis.size for axis in program.axes]
    names = dict.fromkeys(name for stage in part.stages for name in stage.state.values())
    found: dict[str, Tensor] = {}
    for spec in map(program.state.__getitem__, names):
        if spec.kind == "cache":
            pools, _, *page = local_shape(spec.shape, spec.sharding, sizes)
            found[spec.name] = torch.zeros(pools, pages, *page, dtype=spec.dtype, device=device)
            if spec.name in old:
                found[spec.name][:, : old[spec.name].shape[1]] = old[spec.name]
    return found


def placements(spec: StateSpec, axes: Sequence[Axis], mesh: DeviceMesh) -> tuple[Placement, ...]:
    """DTensor placements on ``mesh`` (the ranks of one stage)."""
    found: dict[str, Placement] = {}
    left: tuple[int, ...] = spec.shape
    for axis, kind in zip(axes, spec.sharding, strict=True):
        if isinstance(kind, ShardType):
            found[axis.name] = _cut(kind, left[kind.dim], axis.size)
        left = shard_shape(left, kind, axis.size)
    return tuple(found.get(name, Replicate()) for name in mesh.mesh_dim_names or ())


def _cut(kind: ShardType, size: int, ranks: int) -> Placement:
    """Of a dim of ``size``. What ranks have of single indices where that is the same as of whole units."""
    if kind.padded(size, ranks) != replace(kind, unit=1).padded(size, ranks):
        return interleaved_shard(kind.dim, kind.parts, size // (kind.parts * kind.unit))
    return Shard(kind.dim) if kind.parts == 1 else interleaved_shard(kind.dim, kind.parts)


def sharded_dtensor(local: Tensor, spec: StateSpec, axes: Sequence[Axis], mesh: DeviceMesh) -> DTensor:
    """This rank's part of a parameter or gradient, without padding, as a DTensor over the ranks of its stage; where it
    is: a part on the host stays there."""
    stride = torch.empty(spec.shape, device="meta").stride()
    return without_offset(dtensor_over(local, mesh, placements(spec, axes, mesh), torch.Size(spec.shape), stride))


def without_offset(x: T) -> T:
    """The same part, in a DTensor that says nothing of where in a larger memory it begins: torch 2.13 takes such a
    DTensor for one that has memory of its own, which ``copy.deepcopy``, ``pickle`` and ``dcp.async_save`` fail to
    copy."""
    if not isinstance(x, DTensor) or not local_tensor(x).storage_offset():
        return x
    part, mesh, shape = local_tensor(x), x.device_mesh, x.shape
    first = part.detach().as_strided(part.shape, part.stride(), 0)  # the beginning of that memory
    made = dtensor_over(first, mesh, x.placements, shape, x.stride())
    replace_local_tensor(made, part)
    return made  # type: ignore[return-value]
