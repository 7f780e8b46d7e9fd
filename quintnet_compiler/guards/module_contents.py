"""Guards of the namespaces that others look in, and of the parts, parameters and buffers that modules have."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from .columns import Space
from .namespaces import MISSING

_PARTS, _PARAMETERS, _BUFFERS = itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers")


@dataclass(frozen=True)
class Namespaces:
    """See whether objects (``plain``: those that answer to ``__dict__`` as others do) have the namespaces they had."""

    rows: tuple[tuple[str, Any, Space], ...]
    plain: tuple[tuple[Any, Space], ...]
    others: tuple[tuple[Any, Space], ...]

    @classmethod
    def current(cls, rows: Iterable[tuple[str, Any]]) -> Namespaces:
        """Return guards of the namespaces that labelled objects have now; of some, Python makes one for each look."""
        owners = {id(owner): (label, owner, _fields(owner)) for label, owner in rows}
        lasting = tuple(row for row in owners.values() if type(row[-1]) is dict and _fields(row[1]) is row[-1])
        plain = tuple((owner, space) for _, owner, space in lasting if _is_plain(owner))
        return cls(lasting, plain, tuple((owner, space) for _, owner, space in lasting if not _is_plain(owner)))

    def hold(self) -> bool:
        """Return whether they have these namespaces."""
        for owner, space in self.plain:
            if owner.__dict__ is not space:
                return False
        return not self.others or all(_fields(owner) is space for owner, space in self.others)

    def broken(self) -> list[str]:
        """Say who has another one."""
        return [
            f"{label or 'the model'} has another __dict__" for label, owner, x in self.rows if _fields(owner) is not x
        ]


def _fields(owner: Any) -> Any:
    """Return an object's own namespace, None if it has none, whatever its class answers to ``__dict__``."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _is_plain(owner: Any) -> bool:
    method: Any = type(owner).__getattribute__
    return method is object.__getattribute__ and owner.__dict__ is _fields(owner)


@dataclass(frozen=True)
class Parts:
    """The modules inside of modules.

    ``rows``: a label, a module's dict of its parts, and what was in it. ``empty``: the namespaces of modules that had
    no parts, and their labels. ``spaces``: the dicts of ``rows``, and something after each of them; ``held``: all that
    these hold, as Python's collector of garbage lists it in a single call.
    """

    rows: tuple[tuple[str, dict[str, Any], list[Any]], ...]
    empty: tuple[tuple[Space, ...], tuple[str, ...]]
    spaces: tuple[Any, ...]
    held: list[Any]

    @classmethod
    def current(cls, rows: Sequence[tuple[str, Space]]) -> Parts:
        """Return guards of the parts that modules with these namespaces have now."""
        inner = [(label, _PARTS(space)) for label, space in rows if _PARTS(space)]
        empty = [(label, space) for label, space in rows if not _PARTS(space)]
        spaces = tuple(x for _, space in inner for x in (space, (MISSING,)))
        values = tuple((label, space, list(dict.values(space))) for label, space in inner)
        without = tuple(space for _, space in empty), tuple(label for label, _ in empty)
        return cls(values, without, spaces, gc.get_referents(*spaces))

    def hold(self) -> bool:
        """Return whether modules have these parts, and no others have any."""
        return not any(map(_PARTS, self.empty[0])) and (
            gc.get_referents(*self.spaces) == self.held or not self.broken()
        )

    def broken(self) -> list[str]:
        """Say which modules have other parts."""
        labels = [label for label, space, then in self.rows if list(dict.values(space)) != then]
        labels += [label for space, label in zip(*self.empty, strict=True) if _PARTS(space)]
        return [f"{label or 'the model'} has other parts than it had" for label in labels]


@dataclass(frozen=True)
class Registered:
    """See how many parameters and buffers modules have together; ``compared``: their namespaces, each for both."""

    compared: tuple[Space, ...]
    count: int

    @classmethod
    def current(cls, spaces: Iterable[Space]) -> Registered:
        """Return a guard of the number that there is now."""
        return cls(namespaces := tuple(spaces), _count_tensors(namespaces))

    def hold(self) -> bool:
        """Return whether there are as many now."""
        return _count_tensors(self.compared) == self.count

    def broken(self) -> list[str]:
        """Say that there are more or fewer."""
        return [] if self.hold() else ["the model has another number of parameters and buffers than it had"]


def _count_tensors(spaces: Sequence[Space]) -> int:
    """Count the parameters and buffers of modules; Python's collector of garbage does so in a single call."""
    return len(gc.get_referents(*map(_PARAMETERS, spaces), *map(_BUFFERS, spaces)))
