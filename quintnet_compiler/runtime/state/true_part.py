"""A rank's part of a parameter without its padding: what optimizers, checkpoints and people see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...core import slices
from ...core.sharding import Sharding
from ...ir.program import Axis


@dataclass(frozen=True)
class TruePart:
    """What of a rank's part is no padding, which is at the end of dims: ``positions``: for each dim, the global indices
    that the rank has."""

    positions: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], sharding: Sharding, axes: Sequence[Axis], coordinate: Mapping[str, int]
    ) -> TruePart:
        """Of a tensor of global ``shape`` on the rank at ``coordinate``."""
        ranks, places = [axis.size for axis in axes], [coordinate.get(axis.name, 0) for axis in axes]
        found = slices.positions(shape, sharding, ranks, places)
        return cls(tuple(indices[indices >= 0] for indices in found))

    def of_padded(self, x: Tensor) -> Tensor:
        """``x`` without its padding, in its memory."""
        return without_padding(x, [len(indices) for indices in self.positions])


def without_padding(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The beginning of ``x`` in every dim, in its memory."""
    for dim, size in enumerate(shape):
        if size < x.shape[dim]:
            x = x.narrow(dim, 0, size)
    return x


def with_padding(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` with zeros at the end of every dim that is shorter; ``x`` itself if none is."""
    if tuple(x.shape) == tuple(shape):
        return x
    longer = x.new_zeros(shape)
    without_padding(longer, x.shape).copy_(x)
    return longer
