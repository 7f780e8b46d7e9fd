"""Which rank holds which part of any DTensor, this package's or not."""

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
    """``types``: of each axis of its mesh, as plans have them. ``parts``: the global indices along each dim, and the
    ranks that hold them."""

    types: Mapping[str, str]
    parts: tuple[tuple[tuple[Tensor, ...], tuple[int, ...]], ...]


def dtensor_parts(x: Tensor) -> DTensorParts | None:
    """Nothing is communicated. None for what is no DTensor."""
    if not isinstance(x, DTensor):
        return None
    mesh = x.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
    holders: dict[tuple[int, ...], list[int]] = {}
    for place in itertools.product(*(range(size) for size in mesh.mesh.shape)):
        kept = zip(place, x.placements, strict=True)
        cut = tuple(index if not isinstance(kind, (Replicate, Partial)) else 0 for index, kind in kept)
        holders.setdefault(cut, []).append(int(mesh.mesh[place]))
    parts = tuple((tuple(positions_of(x, cut)), tuple(ranks)) for cut, ranks in sorted(holders.items()))
    return DTensorParts({n: _type(kind) for n, kind in zip(names, x.placements, strict=True)}, parts)


def _type(kind: Placement) -> str:
    if isinstance(kind, Replicate):
        return "R"
    if isinstance(kind, Partial):
        return "P"
    dim, parts = getattr(kind, "dim", "?"), getattr(kind, "split_factor", 1) & ((1 << 32) - 1)
    return f"S({dim})" if parts == 1 else f"S({dim},{parts})"
