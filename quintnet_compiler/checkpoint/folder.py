"""A folder of checkpoints: which are there, under which names.

``step-00000042`` is a complete checkpoint. ``.step-00000042.<token>.tmp`` is one that is being written, or was when its
writer died; ``.old`` is one that a writer moved away before it put another in its place, on a file system that cannot
exchange two names. ``abandoned-01/`` has the checkpoints of a run that went on from an earlier step.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.[0-9a-f]{8}\.(tmp|old)")
_ABANDONED = re.compile(r"abandoned-(\d{2,})")


@dataclass(frozen=True)
class Entry:
    """A checkpoint's folder: that of ``step``, whatever its name is."""

    step: int
    path: Path


def name_of(step: int) -> str:
    return f"step-{step:08}"


def named(folder: Path) -> list[Entry]:
    """Checkpoints that have their name, the newest first. They may be damaged."""
    return _matching(folder, _NAME)


def leftovers(folder: Path) -> list[Entry]:
    """What dead writers left, the newest first: a checkpoint of the same step that was to replace another before it."""
    found = _matching(folder, _LEFTOVER)
    return sorted(found, key=lambda entry: (-entry.step, entry.path.suffix != ".tmp"))


def abandoned(folder: Path) -> list[Path]:
    """Folders of checkpoints that a run left behind, those of the last first."""
    found = [(int(match[1]), path) for path, match in _folders(folder, _ABANDONED)]
    return [path for _, path in sorted(found, reverse=True)]


def next_abandoned(folder: Path) -> Path:
    last = next(iter(abandoned(folder)), None)
    number = 1 if last is None else int(last.name.removeprefix("abandoned-")) + 1
    return folder / f"abandoned-{number:02}"


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Entry]:
    found = (Entry(int(match[1]), path) for path, match in _folders(folder, pattern))
    return sorted(found, key=lambda entry: -entry.step)


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    there = ((folder / entry.name, pattern.fullmatch(entry.name)) for entry in os.scandir(folder) if entry.is_dir())
    return [(path, match) for path, match in there if match]
