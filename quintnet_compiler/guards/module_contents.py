"""Guards of the namespaces that others look in, and of the parts, parameters and buffers that modules have."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from ..compat.torch import dict_version, unwritten_guard
from .columns import Space

_PARTS, _PARAMETERS, _BUFFERS = itemgetter("_modules"), itemgetter("_parameters"), itemgetter("_buffers")
_NAMESPACE = attrgetter("__dict__")
STEPS_BEFORE_CPP = 100  # without a write: what compares in C++ takes as long to make as a few hundred comparisons


@dataclass(frozen=True)
class Namespaces:
    """See whether objects have the namespaces that they had."""

    rows: tuple[tuple[str, Any, Space], ...]

    @classmethod
    def current(cls, rows: Iterable[tuple[str, Any]]) -> Namespaces:
        """Return guards of the namespaces that labelled objects have now; of some, Python makes one for each look."""
        owners = {id(owner): (label, owner, _fields(owner)) for label, owner in rows}
        return cls(tuple(row for row in owners.values() if type(row[-1]) is dict and _fields(row[1]) is row[-1]))

    def hold(self) -> bool:
        """Return whether they have these namespaces."""
        for _, owner, space in self.rows:  # noqa: SIM110 -- mostly there are none: a generator would make a call
            if _fields(owner) is not space:
                return False
        return True

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        return Namespaces(tuple(row for row in self.rows if id(row[1]) not in ids)).hold

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


@dataclass
class DictVersions:
    """The versions of dicts, of which each write makes another: what those with the same versions hold is the same.

    ``owners``: objects whose classes and namespaces are meant, those that they have now; ``dicts``: others.
    ``latest``: what was read last; ``compared``: what was read before all was compared. ``unwritten_steps``: since
    then. ``unwritten``: compares the same in C++, where that is worth making it.
    """

    owners: tuple[Any, ...]
    dicts: tuple[dict[str, Any], ...]
    latest: list[Any] = field(default_factory=list)
    compared: list[Any] = field(default_factory=list)
    unwritten_steps: int = 0
    unwritten: Callable[[], bool] | None = None

    @classmethod
    def current(cls, namespaces: Namespaces, dicts: Iterable[Space]) -> DictVersions:
        """Return those of the namespaces of objects that answer to ``__dict__`` as others do, and of exact dicts."""
        owners = tuple(owner for _, owner, _ in namespaces.rows if _is_plain(owner))
        return cls(owners, tuple(x for x in dicts if type(x) is dict))

    def hold(self) -> bool:
        """Return whether nobody wrote since all was compared."""
        if self.unwritten is not None and self.unwritten():
            return True
        make_guard = self.unwritten_steps == STEPS_BEFORE_CPP
        unwritten = unwritten_guard(self.owners, self.dicts) if make_guard else None  # of versions not after `latest`
        self.latest = self.read()
        same = self.latest == self.compared
        self.unwritten_steps = self.unwritten_steps + 1 if same else 0
        self.unwritten = unwritten if same else None
        return same

    def remember(self) -> None:
        """Take note that all was compared after :meth:`hold`."""
        self.compared = self.latest

    def read(self) -> list[Any]:
        """Return the classes and versions of now."""
        namespaces = map(dict_version, map(_NAMESPACE, self.owners))
        return [*map(type, self.owners), *namespaces, *map(dict_version, self.dicts)]

    @property
    def ids(self) -> Set[int]:
        """The ids of the objects and dicts."""
        return frozenset(map(id, (*self.owners, *map(_NAMESPACE, self.owners), *self.dicts)))


@dataclass(frozen=True)
class Parts:
    """The modules inside of modules.

    ``rows``: a label, a module's namespace, and its parts. ``empty``: the dicts of those without, looked up last.
    """

    rows: tuple[tuple[str, Space, list[Any]], ...]
    empty: list[Any] = field(default_factory=list)

    @classmethod
    def current(cls, rows: Iterable[tuple[str, Space]]) -> Parts:
        """Return guards of the parts that modules with these namespaces have now."""
        return cls(tuple((label, space, _parts(space)) for label, space in rows))

    def hold(self) -> bool:
        """Look up all parts, and return whether modules have those that they had."""
        self.empty[:] = [_PARTS(space) for _, space, then in self.rows if not then]
        return not any(self.empty) and all(_parts(space) == then for _, space, then in self.rows if then)

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        spaces = [x for _, space, then in self.rows for x in ((space, _PARTS(space)) if then else (space,))]
        return self._stay_empty if ids >= set(map(id, spaces)) else self.hold

    def _stay_empty(self) -> bool:
        return not any(self.empty)

    def broken(self) -> list[str]:
        """Say which modules have other parts."""
        labels = [label for label, space, then in self.rows if _parts(space) != then]
        return [f"{label or 'the model'} has other parts than it had" for label in labels]


def _parts(space: Space) -> list[Any]:
    return list(dict.values(_PARTS(space)))


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
