"""Types of a value on each mesh axis: invariant, replicated, partial or a shard.

=========  ===============================  ==========================
type       forward value                    its gradient
=========  ===============================  ==========================
``I``      the same on all ranks            the same on all ranks
``R``      the same on all ranks            partial: each holds a term
``P``      partial: each rank holds a term  the same on all ranks
``S(d)``   a slice along dim ``d``          the same slice
=========  ===============================  ==========================

The forward type determines the gradient's type, so a conversion determines its own transpose: if ``x`` goes
from ``a`` to ``b``, its gradient goes from ``gradient(b)`` to ``gradient(a)``. Megatron's f and g are I -> R and
P -> I. (The discipline of JAX's shard_map and of PyTorch's SPMD types.)

``S(d, k)`` views dim ``d`` as (k, n, rest) and slices the n: with k = 3 it shards a fused QKV weight head by head.

A size need not divide. ``S(d, k, u)`` views the dim as (k, units, u) and distributes the units as torch.chunk does: the
first ranks get full chunks, the next one the remainder, and the others nothing. Every rank holds a full chunk, padded
at its end, since all ranks of a stage run one program. u matters only where units do not divide.

The axes of a :data:`Sharding` nest: each type describes the tensor that the axes before it produced. Two axes may
therefore shard one dim, the earlier one outermost.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class Same(enum.Enum):
    """A type under which every rank holds a tensor of the full size."""

    INVARIANT = "I"
    REPLICATED = "R"
    PARTIAL = "P"

    def __str__(self) -> str:
        """Return the letter."""
        return self.value

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice: ``dim`` is viewed as (``parts``, ranks, rest), of which each rank holds one index of the middle.

    Where units of ``unit`` indices do not divide, the last ranks hold fewer units, and padding in their place.
    """

    dim: int
    parts: int = 1
    unit: int = 1

    def __str__(self) -> str:
        """Return the text that :func:`parse_type` reads."""
        return f"S({self.dim})" if (self.parts, self.unit) == (1, 1) else f"S({self.dim},{self.parts}{self._unit})"

    __repr__ = __str__

    @property
    def _unit(self) -> str:
        return "" if self.unit == 1 else f",{self.unit}"

    def padded(self, size: int, ranks: int) -> int:
        """Return ``size`` with the padding that makes all ``ranks`` hold the same number of indices.

        >>> Shard(0).padded(7, 2), Shard(0, 2).padded(6, 2), Shard(0, 1, 8).padded(24, 2)
        (8, 8, 32)
        """
        step = self.parts * self.unit * ranks
        return -(-size // step) * step


AxisType = Same | Shard
Sharding = tuple[AxisType, ...]

I, R, P = Same.INVARIANT, Same.REPLICATED, Same.PARTIAL  # noqa: E741  the names of the literature
S = Shard


def gradient(kind: AxisType) -> AxisType:
    """Return the type of the gradient of a value of type ``kind``, as a plain value (never R).

    >>> gradient(R), gradient(P), gradient(S(1))
    (P, I, S(1))
    """
    return {I: I, R: P, P: I}[kind] if isinstance(kind, Same) else kind


def forward_type(kind: AxisType) -> AxisType:
    """Return the type of the forward value alone: I and R hold the same bits."""
    return I if kind is R else kind


def parse_type(text: str) -> AxisType:
    """Read ``I``, ``R``, ``P``, ``S(0)``, ``S(0,3)`` or ``S(0,1,64)``.

    Raises:
        ValueError: if the text is none of these.
    """
    if text in ("I", "R", "P"):
        return Same(text)
    match = re.fullmatch(r"S\((\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?\)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a sharding type; use I, R, P, S(dim), S(dim,parts) or S(dim,parts,unit)")
    return Shard(int(match[1]), int(match[2] or 1), int(match[3] or 1))


def shard_shape(shape: Sequence[int], kind: AxisType, ranks: int) -> tuple[int, ...]:
    """Return the shape that one rank holds after one axis, with padding."""
    if not isinstance(kind, Shard):
        return tuple(shape)
    return tuple(kind.padded(size, ranks) // ranks if dim == kind.dim else size for dim, size in enumerate(shape))


def local_shape(shape: Sequence[int], sharding: Sharding, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that one rank holds of a tensor of global ``shape``, with padding.

    >>> local_shape((8, 6), (S(0), S(1)), (2, 3)), local_shape((7,), (S(0),), (2,))
    ((4, 2), (4,))
    """
    for kind, count in zip(sharding, ranks, strict=True):
        shape = shard_shape(shape, kind, count)
    return tuple(shape)


def conversion_path(source: Sharding, target: Sharding, same: AxisType) -> list[tuple[int, AxisType]]:
    """Return steps (axis position, new type) from ``source`` to ``target``, each of which changes one axis.

    A later axis nests inside an earlier one. So where several axes slice one dim and one of them changes, the inner
    ones are gathered first (to ``same``: R where gradients flow, else I), and the dim is sliced again from the
    outermost axis inwards. Without this, converting one of two axes on a dim would permute the other's slices: a
    silently wrong answer.

    >>> conversion_path((S(0), S(0)), (I, S(0)), I)
    [(1, I), (0, I), (1, S(0))]
    """
    sharded_dims = [
        {kind.dim for kind in types if isinstance(kind, Shard)} for types in zip(source, target, strict=True)
    ]
    changing = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    nested = _sharing_a_dim(changing, sharded_dims)
    state, steps = list(source), []

    def step(axis: int, kind: AxisType) -> None:
        if state[axis] != kind:
            state[axis] = kind
            steps.append((axis, kind))

    # Shrink before growing: reductions and slices first keep the later all-gathers small.
    independent = [axis for axis in changing if axis not in nested]
    independent.sort(key=lambda axis: (isinstance(source[axis], Shard), not isinstance(target[axis], Shard)))
    for axis in independent:
        step(axis, target[axis])
    for axis in sorted(nested, reverse=True):
        outer = [other for other in changing if other < axis and sharded_dims[axis] & sharded_dims[other]]
        if outer and isinstance(state[axis], Shard):
            step(axis, same)
    for axis in sorted(nested):
        step(axis, target[axis])
    return steps


def _sharing_a_dim(changing: Sequence[int], sharded_dims: Sequence[set[int]]) -> set[int]:
    """Return the axes that shard a dim together with another axis, where at least one of the two changes."""
    nested: set[int] = set()
    for axis in changing:
        for other, dims in enumerate(sharded_dims):
            if axis != other and sharded_dims[axis] & dims:
                nested |= {axis, other}
    return nested
