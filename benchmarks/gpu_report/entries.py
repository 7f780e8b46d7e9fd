"""What a part of the report finds, one after the other: a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

Cell = str | int | float


@dataclass(frozen=True)
class Check:
    """Something that must hold. ``found``: the numbers that say whether it does."""

    what: str
    good: bool
    found: str = ""


@dataclass(frozen=True)
class Figures:
    """A row of measurements. All rows of a table have the same columns, whose names have the units."""

    table: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class NotRun:
    """Something that belongs to a part and was left out."""

    what: str
    why: str


Entry = Check | Figures | NotRun
KINDS: tuple[type[Entry], ...] = (Check, Figures, NotRun)


def line_of(entry: Entry) -> str:
    return json.dumps({"kind": type(entry).__name__, **asdict(entry)}) + "\n"


def entry_of(line: str) -> Entry:
    """The reverse of :func:`line_of`.

    >>> entry_of(line_of(NotRun("idle share", "no profiler")))
    NotRun(what='idle share', why='no profiler')
    """
    fields = json.loads(line)
    name = fields.pop("kind")
    return next(kind for kind in KINDS if kind.__name__ == name)(**fields)
