"""Tied parameters in checkpoints: stored once by this package, under each of their names by others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch

from .parts import SavedPart

Read = Callable[[dict[str, SavedPart]], None]


def under_stored_names(
    mine: Mapping[str, SavedPart], aliases: Mapping[str, str], saved: Collection[str]
) -> dict[str, SavedPart]:
    """``mine``, but for parameters that were stored under another of their names. ``aliases``: further name -> the one
    that ``mine`` has."""
    other = {kept: alias for alias, kept in aliases.items() if kept not in saved and alias in saved}
    return {other.get(name, name): part for name, part in mine.items()}


def torn_ties(
    mine: Mapping[str, SavedPart], aliases: Mapping[str, str], saved: Collection[str], read: Read
) -> list[tuple[str, str]]:
    """Names of parameters that were stored twice, with values that differ in this rank's part. ``read``
    fills parts."""
    twice = [(alias, kept) for alias, kept in aliases.items() if kept in saved and alias in saved]
    if not twice:
        return []
    here = [(alias, kept) for alias, kept in twice if kept in mine]
    rooms = {kept: _room(mine[kept]) for _, kept in here}
    others = {alias: _room(mine[kept]) for alias, kept in here}
    read(rooms | others)
    return [
        (alias, kept)
        for alias, kept in here
        if not all(torch.equal(rooms[kept].boxes[at], box) for at, box in others[alias].boxes.items())
    ]


def _room(part: SavedPart) -> SavedPart:
    return SavedPart(part.shape, part.local, {at: torch.empty_like(box) for at, box in part.boxes.items()})
