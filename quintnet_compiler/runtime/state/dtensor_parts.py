"""The parts of any DTensor, and the ranks that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from ...compat.distributed import positions_of


@dataclass(frozen=True)
class DTensorParts:
    """The layout of a DTensor.

    Attributes:
        types: the type on each axis of its mesh, written as in plans.
        parts: for each part, its global indices along each dim, and the ranks that hold it.
    """

    types: Mapping[str, str]
    parts: tuple[tuple[tuple[Tensor, ...], tuple[int, ...]], ...]


def dtensor_parts(x: Tensor) -> DTensorParts | None:
    """Return the parts of a DTensor, None for another tensor. Nothing is communicated."""
    if not isinstance(x, DTensor):
        return None
    mesh = x.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
    holders: dict[tuple[int, ...], list[int]] = {}
    for coordinate in itertools.product(*(range(size) for size in mesh.mesh.shape)):
        kinds = zip(coordinate, x.placements, strict=True)
        part = tuple(index if not isinstance(kind, (Replicate, Partial)) else 0 for index, kind in kinds)
        holders.setdefault(part, []).append(int(mesh.mesh[coordinate]))
    parts = tuple((tuple(positions_of(x, part)), tuple(ranks)) for part, ranks in sorted(holders.items()))
    return DTensorParts({n: _type(kind) for n, kind in zip(names, x.placements, strict=True)}, parts)


def _type(kind: Placement) -> str:
    if isinstance(kind, Replicate):
        return "R"
    if isinstance(kind, Partial):
        return "P"
    dim, parts = getattr(kind, "dim", "?"), getattr(kind, "split_factor", 1) & ((1 << 32) - 1)
    return f"S({dim})" if parts == 1 else f"S({dim},{parts})"
