"""The axes of a mesh, outermost first: ranks that are neighbours along the last one are closest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["pipeline", "data", "time", "context", "model"]
DataAxis = Literal["dp", "ep", "cp"]  # axes whose ranks may store slices of parameters


@dataclass(frozen=True)
class MeshAxis:
    """An axis of a mesh.

    Attributes:
        role: ``pipeline`` has stages; ``data`` shards the batch and never gathers activations; ``context`` shards
            sequences; ``model`` shards parameters. ``time``, along which nothing can be exchanged, is the axis of
            microbatches, which no mesh has.
    """

    name: str
    title: str
    role: Role


MESH_AXES = (
    MeshAxis("pp", "pipeline", "pipeline"),
    MeshAxis("dp", "data", "data"),
    MeshAxis("ep", "expert", "data"),
    MeshAxis("cp", "context", "context"),
    MeshAxis("tp", "tensor", "model"),
)
AXES = tuple(axis.name for axis in MESH_AXES)
SHARDED = tuple(axis for axis in MESH_AXES if axis.role != "pipeline")  # in the order in which slices nest
SHARDED_AXES = tuple(axis.name for axis in SHARDED)
DATA_AXES = tuple(axis.name for axis in MESH_AXES if axis.role == "data")
