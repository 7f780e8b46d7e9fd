"""A rank's part of a parameter without its padding, as optimizers, checkpoints and users see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compat.distributed import dtensor_over
from ...core import slices
from ...core.sharding import Sharding
from ...ir.program import Axis


@dataclass(frozen=True)
class TruePart:
    """A rank's part of a tensor without the padding at the end of dims.

    Attributes:
        positions: for each dim, the global indices that the rank has.
    """

    positions: tuple[Tensor, ...]

    @classmethod
    def on_rank(
        cls, shape: Sequence[int], sharding: Sharding, axes: Sequence[Axis], coordinate: Mapping[str, int]
    ) -> TruePart:
        """Return the part of a tensor of global ``shape`` on the rank at ``coordinate``."""
        ranks, coordinates = [axis.size for axis in axes], [coordinate.get(axis.name, 0) for axis in axes]
        positions = slices.positions(shape, sharding, ranks, coordinates)
        return cls(tuple(indices[indices >= 0] for indices in positions))

    def of_padded(self, x: Tensor) -> Tensor:
        """Return ``x`` without its padding, as a view."""
        return without_padding(x, [len(indices) for indices in self.positions])


@dataclass(frozen=True)
class StoredPart:
    """The part of a parameter that a rank stores.

    Attributes:
        shape: the global shape.
        sharding: the type on each axis.
        sizes: the number of ranks of each axis.
        places: this rank's coordinate on each axis.
        true: the part without padding.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    true: TruePart

    def __call__(self, x: Any, like: DTensor) -> Any:
        """Return the part of a whole tensor as a DTensor like ``like``; return anything else unchanged."""
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or tuple(x.shape) != self.shape:
            return x
        part = self.true.of_padded(slices.take_all(x.detach(), self.sharding, self.sizes, self.places)).to(like.device)
        shape, stride = torch.Size(self.shape), like.stride()
        return dtensor_over(part, like.device_mesh, like.placements, shape, stride)


def without_padding(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first ``shape`` elements of ``x`` in every dim, as a view."""
    for dim, size in enumerate(shape):
        if size < x.shape[dim]:
            x = x.narrow(dim, 0, size)
    return x


def with_padding(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` with zeros at the end of dims that are shorter than ``shape``; ``x`` itself if none is."""
    if tuple(x.shape) == tuple(shape):
        return x
    longer = x.new_zeros(shape)
    without_padding(longer, x.shape).copy_(x)
    return longer
