"""Containers that a trace may have read unseen: what each of them held, compared in C."""

from __future__ import annotations

import array
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy
from torch import nn

from .python_state import MISSING, OWN, PLAIN, SlotFields, shown, slot_names

Reader = Callable[[Any], Iterable[Any]]


def _fields(owner: Any) -> Iterable[Any]:
    values: Iterable[Any] = vars(owner).values()
    return values


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not set
        return [MISSING]


def _context_value(variable: ContextVar[Any]) -> list[Any]:
    return [variable.get(MISSING)]


def _target(reference: weakref.ref[Any]) -> list[Any]:
    return [reference()]


# How values of a type, or of its subclasses, give what they hold; the methods of the base class, whatever a subclass
# makes of them.
READERS: dict[type, Reader] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
    types.MappingProxyType: types.MappingProxyType.values,
    types.SimpleNamespace: _fields,
    types.CellType: _cell_contents,
    types.FunctionType: attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__dict__"),
    types.MethodType: attrgetter("__self__", "__func__"),
    functools.partial: attrgetter("func", "args", "keywords"),
    ContextVar: _context_value,
    weakref.ref: _target,
}
KEYS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.keys,
    types.MappingProxyType: types.MappingProxyType.keys,
    types.SimpleNamespace: vars,
}
# What holds numbers in memory of its own.
BUFFERS = (numpy.ndarray, bytearray, array.array, memoryview)


def fields_reader(owner: Any) -> tuple[Reader, Callable[[Any], Iterable[Any]]]:
    """Return how an object gives the values of its attributes, and their names."""
    plain = hasattr(owner, "__dict__") and not slot_names(type(owner)) and not isinstance(owner, nn.Module)
    return (_fields, vars) if plain else (fields_of, names_of)


def reader_of(value: Any) -> tuple[Reader, Callable[[Any], Iterable[Any]] | None] | None:
    """Return how ``value`` gives what it holds, and the names of that; None if it is no container."""
    for kind, reader in READERS.items():
        if isinstance(value, kind):
            return reader, KEYS.get(kind)
    return None


def fields_of(owner: Any) -> list[Any]:
    """Return what the attributes of an object are, those of torch's own left out where it is a module."""
    return list(_named_fields(owner).values())


def names_of(owner: Any) -> list[str]:
    """Return the names of the attributes of an object, as :func:`fields_of` lists them."""
    return list(_named_fields(owner))


def _named_fields(owner: Any) -> dict[str, Any]:
    fields = getattr(owner, "__dict__", None)
    named = dict(fields) if isinstance(fields, dict) else {}
    if slot_names(type(owner)):
        named.update(SlotFields(owner))
    return {name: x for name, x in named.items() if name not in OWN} if isinstance(owner, nn.Module) else named


def equal(now: Any, then: Any) -> bool:
    """Return whether two values are one object, or the same plain data."""
    if now is then:
        return True
    return type(now) is type(then) and isinstance(now, PLAIN) and bool(now == then)


@dataclass
class ContainerSnapshot:
    """One container as it was. Of ``unread`` values, numbers may be others of the same type, and containers may hold
    something else. ``only``: the names that count, if others do not, nor how many there are.
    """

    label: str
    owner: Any
    read: Reader
    keys: Callable[[Any], Iterable[Any]] | None
    unread: frozenset[Any] = frozenset()
    only: tuple[Any, ...] | None = None
    held: list[Any] = field(init=False)  # keeps the numbers of the objects from being given to others
    ids: list[int] = field(init=False)
    names: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.held, self.names = self.values(), self._names()
        self.ids = list(map(id, self.held))

    def values(self) -> list[Any]:
        """Return what the container holds that may have been read."""
        if self.only is not None:
            return [dict.get(self.owner, name, MISSING) for name in self.only]
        values = list(self.read(self.owner))
        if not self.unread:
            return values
        names = self._names()
        pairs = zip(names, values, strict=True)
        return [type(x) if name in self.unread and isinstance(x, (int, float)) else x for name, x in pairs]

    def _names(self) -> list[Any]:
        if self.only is not None:
            return list(self.only)
        return list(self.keys(self.owner)) if self.keys is not None else list(range(len(list(self.read(self.owner)))))

    def holds(self) -> bool:
        """Return whether the container holds what it held."""
        if self.unread or self.only is not None:
            values = self.values()
        else:
            values = list(self.read(self.owner))
        if self.keys is not None and self.only is None and list(self.keys(self.owner)) != self.names:
            return False
        if list(map(id, values)) == self.ids:
            return True
        return self._equal(values)

    def _equal(self, values: list[Any]) -> bool:
        """Compare plain data by its value, and remember the objects that have it now."""
        if len(values) != len(self.held) or not all(map(equal, values, self.held)):
            return False
        self.held, self.ids = values, list(map(id, values))
        return True

    def changes(self) -> list[Any] | None:
        """Return the names of the values that are others now; None if there are more or fewer of them."""
        values = self.values()
        if len(values) != len(self.held) or self._names() != self.names:
            return None
        pairs = zip(self.names, values, self.held, strict=True)
        return [name for name, now, then in pairs if not equal(now, then)]

    def broken(self) -> list[str]:
        """Say what is not as it was."""
        names = self.changes()
        if names is None:
            return [f"{self.label} holds other objects than it did"]
        then, now = dict(zip(self.names, self.held, strict=True)), dict(zip(self.names, self.values(), strict=True))
        return [f"{self.label}[{name!r}] is {shown(now[name])} and was {shown(then[name])}" for name in names]


@dataclass(frozen=True)
class Numbers:
    """An array as it was: its shape, and its bytes or the objects that it holds."""

    label: str
    owner: Any
    then: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", self._now())

    def _now(self) -> tuple[Any, ...]:
        owner = self.owner
        if isinstance(owner, numpy.ndarray):
            content: Any = owner.ravel().tolist() if owner.dtype.hasobject else owner.tobytes()
            return owner.shape, str(owner.dtype), content
        return len(owner), type(owner).__name__, bytes(owner)

    def holds(self) -> bool:
        """Return whether the array has the values that it had."""
        return self._now() == self.then

    def broken(self) -> list[str]:
        """Say that the array has other values."""
        return [] if self.holds() else [f"{self.label} has other values than it had"]


@dataclass(frozen=True)
class ContainerGuards:
    """All containers and arrays that a trace may have read."""

    snapshots: Sequence[ContainerSnapshot]
    numbers: Sequence[Numbers]

    def hold(self) -> bool:
        """Return whether all of them hold what they held."""
        return all(map(ContainerSnapshot.holds, self.snapshots)) and all(map(Numbers.holds, self.numbers))

    def broken(self) -> list[str]:
        """Say what is not as it was."""
        lines = [line for snapshot in self.snapshots if not snapshot.holds() for line in snapshot.broken()]
        return lines + [line for array_guard in self.numbers for line in array_guard.broken()]
