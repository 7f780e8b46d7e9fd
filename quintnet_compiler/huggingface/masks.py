"""Masks of Hugging Face models as what one operator knows: a function of positions, and ids of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..compat.transformers import MaskPart
from ..ops.attention.blocks import Sight


@dataclass(frozen=True)
class KnownMask:
    """The parts of a 4-D mask; see :data:`quintnet_compiler.ops.attention.operator.attention`. ``segments`` are
    numbers from 0 to below the length; ``alone``: nothing is seen but what groups say."""

    sight: Sight = Sight()
    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None
    alone: bool = False

    @property
    def everything(self) -> bool:
        """Return whether nothing but padding hides a key."""
        return self.sight == Sight() and self.segments is None and self.groups is None


def known_mask(part: MaskPart, length: int, device: Any) -> KnownMask | None:
    """Return what a mask of ``length`` positions consists of; None where that is more than the operator knows."""
    return _Fold(length, device).fold(part, None)


@dataclass(frozen=True)
class _Fold:
    """``positions``, where given: a mask counts these [B, length] instead of places. They count on within a document,
    and other documents are hidden beside it, so that distances are the same."""

    length: int
    device: Any

    def fold(self, part: MaskPart, positions: Tensor | None) -> KnownMask | None:
        """Return what a part of a mask consists of; None where that is more than the operator knows."""
        name, arguments = part[0], part[1:]
        if name in ("and", "or"):
            return self._joined(name, arguments[0], positions)
        if name in ("causal", "all"):
            return KnownMask(Sight(causal=name == "causal"))
        if name == "window":
            return KnownMask(Sight(window=arguments[0]))
        if name == "chunk":
            size, left = arguments
            return KnownMask(segments=self._chunks(size, left, positions))
        if name == "segments":
            return KnownMask(segments=arguments[0])
        if name == "groups":
            groups = arguments[0]
            return KnownMask(groups=groups if positions is None else groups.gather(1, positions), alone=True)
        return None

    def _joined(self, name: str, parts: Sequence[MaskPart], positions: Tensor | None) -> KnownMask | None:
        """Return what a conjunction ("and") or a disjunction ("or") of parts consists of."""
        join = self._both if name == "and" else _either
        # documents hide each other, so places within them may be counted on
        may_count_on = name == "and" and positions is None and any(part[0] == "segments" for part in parts)
        folded: KnownMask | None = None
        for part in parts:
            counted, inner = (part[1], part[2]) if may_count_on and part[0] == "at" else (positions, part)
            other = self.fold(inner, counted)
            if other is None:
                return None
            folded = other if folded is None else join(folded, other)
            if folded is None:
                return None
        return folded

    def _chunks(self, size: int, left: Tensor, positions: Tensor | None) -> Tensor:
        """Return the chunk of each position, counted from zero."""
        places = torch.arange(self.length, device=self.device)[None] if positions is None else positions
        return self._from_zero((places - left[:, None]) // size)

    def _from_zero(self, chunks: Tensor) -> Tensor:
        """Numbers of runs instead of numbers of chunks, which begin anywhere."""
        return (chunks.diff(prepend=chunks[:, :1], dim=1) != 0).cumsum(1)

    def _both(self, a: KnownMask, b: KnownMask) -> KnownMask | None:
        if a.alone or b.alone or (a.groups is not None and b.groups is not None):
            return None
        grouped, other = (a, b) if a.groups is not None else (b, a)
        sight, groups = _both_sights(a.sight, b.sight), grouped.groups
        if sight is None or (groups is not None and other.sight != Sight()):
            return None
        if groups is not None and other.segments is not None:  # a group within a document
            groups = torch.where(groups >= 0, groups * self.length + other.segments, -1)
        return replace(grouped, sight=sight, segments=self._paired(a.segments, b.segments), groups=groups)

    def _paired(self, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        """Number the runs in which both are the same. No number comes again behind another one, in neither."""
        if a is None or b is None:
            return a if b is None else b
        rows = torch.maximum(*(x.diff(prepend=x[:, :1], dim=1) != 0 for x in (a, b)))
        return rows.cumsum(1)


def _both_sights(a: Sight, b: Sight) -> Sight | None:
    """Return what both show; None where both have a window, or chunks."""
    if (a.window and b.window) or (a.chunk and b.chunk):
        return None
    return Sight(a.causal or b.causal, max(a.window, b.window), max(a.chunk, b.chunk))


def _either(a: KnownMask, b: KnownMask) -> KnownMask | None:
    """Join groups and another mask; a mask of groups alone joins no other groups."""
    shown, other = (a, b) if b.alone else (b, a)
    if not other.alone or shown.groups is not None:
        return None
    return replace(shown, groups=other.groups)
