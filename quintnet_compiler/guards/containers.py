"""Containers that a trace may have read unseen: what each of them held, compared in C."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import io
import mmap
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import numpy
from torch import nn

from .compiled_state import CompiledData, objects_held
from .namespaces import MISSING, SlotFields, slot_names
from .python_state import OWN, is_value, other_zero, short_text

CachedFunction = functools._lru_cache_wrapper  # what functools.cache and lru_cache make


class ContainerReading(NamedTuple):
    """Functions that give what a container holds: ``values`` of ``holder(container)``, and ``names`` if it has any."""

    values: Callable[[Any], Iterable[Any]]
    names: Callable[[Any], Iterable[Any]] | None = None
    holder: Callable[[Any], Any] | None = None  # None: the container itself

    def named_values(self, owner: Any) -> list[tuple[Any, Any]]:
        """Return what ``owner`` holds, each with its name; its number if it has none."""
        holder = owner if self.holder is None else self.holder(owner)
        values = list(self.values(holder))
        names = range(len(values)) if self.names is None else self.names(holder)
        return list(zip(names, values, strict=True))


def _cell_contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not set
        return [MISSING]


_EMPTY: dict[str, Any] = {}
_VIEWS: tuple[Any, ...] = (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())


def _viewed(view: Any) -> list[Any]:
    return [view.mapping]


def _context_value(variable: ContextVar[Any]) -> list[Any]:
    return [variable.get(MISSING), *objects_held(variable)]  # and what it has where nobody set it


def _bound_to(method: Any) -> list[Any]:
    return [method.__self__]


def _array_of(flat: Any) -> list[Any]:
    return [flat.base]


def _target(reference: weakref.ref[Any]) -> list[Any]:
    return [reference()]


def dict_of_results(function: CachedFunction[Any]) -> dict[Any, Any]:
    """Return the dict in which a function keeps its results: of the keys, what the function returned, or holds it."""
    others = reversed(gc.get_referents(function))  # those that are results come before
    return next(x for x in others if type(x) is dict and x is not vars(function))


def _kept_by(function: CachedFunction[Any]) -> list[Any]:
    """Return the function that keeps its results, and all arguments and results that it keeps."""
    results = dict_of_results(function)
    others = [x for x in gc.get_referents(function) if x is not results and not isinstance(x, type)]
    return others if function.cache_parameters()["maxsize"] is not None else [*others, *results, *results.values()]


def _named_fields(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object by their names, without those of torch's own where it is a module."""
    fields = getattr(owner, "__dict__", None)
    named = dict(fields) if isinstance(fields, dict) else {}
    if slot_names(type(owner)):
        named.update(SlotFields(owner))
    return {name: x for name, x in named.items() if name not in OWN} if isinstance(owner, nn.Module) else named


def _own_fields(owner: Any) -> dict[str, Any]:
    """Return what ``vars`` returns, without a call of the object's own ``__getattribute__`` where it has a dict itself.

    A proxy, such as ``weakref.proxy``, has none: what it stands for is asked.
    """
    try:
        fields: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        fields = vars(owner)
    return fields


def _objects_and_fields(owner: Any) -> list[Any]:
    return [*_named_fields(owner).values(), *objects_held(owner)]


OBJECTS_HELD = ContainerReading(objects_held)
OBJECTS_AND_FIELDS = ContainerReading(_objects_and_fields)
_FIELDS = ContainerReading(methodcaller("values"), iter, _own_fields)
_NAMED_FIELDS = ContainerReading(dict.values, dict.keys, _named_fields)

# How values of a type, or of its subclasses, give what they hold; the methods of the base class, whatever a subclass
# makes of them.
READINGS: dict[type, ContainerReading] = {
    dict: ContainerReading(dict.values, dict.keys),
    list: ContainerReading(list.__iter__),
    tuple: ContainerReading(tuple.__iter__),
    set: ContainerReading(set.__iter__),
    frozenset: ContainerReading(frozenset.__iter__),
    deque: ContainerReading(deque.__iter__),
    **dict.fromkeys(map(type, _VIEWS), ContainerReading(_viewed)),
    types.MappingProxyType: ContainerReading(types.MappingProxyType.values, types.MappingProxyType.keys),
    types.SimpleNamespace: _FIELDS,
    types.CellType: ContainerReading(_cell_contents),
    types.FunctionType: ContainerReading(
        attrgetter(
            *("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__dict__"),
            *("__name__", "__qualname__", "__doc__"),
        )
    ),
    types.MethodType: ContainerReading(attrgetter("__self__", "__func__")),
    types.BuiltinFunctionType: ContainerReading(_bound_to),
    types.MethodWrapperType: ContainerReading(_bound_to),
    functools.partial: ContainerReading(attrgetter("func", "args", "keywords")),
    slice: ContainerReading(attrgetter("start", "stop", "step")),
    ContextVar: ContainerReading(_context_value),
    Context: ContainerReading(Context.values, Context.keys),
    numpy.flatiter: ContainerReading(_array_of),
    weakref.ref: ContainerReading(_target),
    CachedFunction: ContainerReading(_kept_by),
}
# What holds numbers or text in memory of its own.
_TEXTS = (io.StringIO, io.BytesIO)
BUFFERS = (
    *(numpy.ndarray, numpy.void, bytearray, array.array, memoryview, mmap.mmap, *_TEXTS),
    ctypes.Structure.__base__ or ctypes.Structure,  # of all data in C
)


def reading_of_fields(owner: Any) -> ContainerReading:
    """Return how an object gives the values of its attributes, and their names."""
    plain = hasattr(owner, "__dict__") and not slot_names(type(owner)) and not isinstance(owner, nn.Module)
    return _FIELDS if plain else _NAMED_FIELDS


def reading_of(value: Any) -> ContainerReading | None:
    """Return how ``value`` gives what it holds; None if it is no container."""
    return next((reading for kind, reading in READINGS.items() if isinstance(value, kind)), None)


def fields_of(owner: Any) -> list[Any]:
    """Return what the attributes of an object are, those of torch's own left out where it is a module."""
    return list(_named_fields(owner).values())


def names_of(owner: Any) -> list[str]:
    """Return the names of the attributes of an object, as :func:`fields_of` lists them."""
    return list(_named_fields(owner))


def is_unchanged(now: Any, then: Any) -> bool:
    """Return whether two values are one object, or the same plain data."""
    if now is then:
        return True
    return type(now) is type(then) and is_value(now) and bool(now == then) and not other_zero(now, then)


def _named(names: list[Any] | int, values: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(range(names) if isinstance(names, int) else names, values, strict=True))


@dataclass
class ContainerSnapshot:
    """One container as it was. Of ``unread`` values, numbers may be others of the same type, and containers may hold
    something else. ``only``: the names that count, if others do not, nor how many there are.
    """

    label: str
    owner: Any
    reading: ContainerReading
    unread: frozenset[Any] = frozenset()
    only: tuple[Any, ...] | None = None
    held: list[Any] = field(init=False)
    names: list[Any] | int = field(init=False)  # how many values there are, if they have none

    def __post_init__(self) -> None:
        self.held, self.names = self._read()

    def _read(self) -> tuple[list[Any], list[Any] | int]:
        """Return what the container holds that may have been read, and the names of that, or how much it is."""
        if self.only is not None:
            return [dict.get(self.owner, name, MISSING) for name in self.only], list(self.only)
        values_of, names_of, holder_of = self.reading
        holder = self.owner if holder_of is None else holder_of(self.owner)
        values = [*values_of(holder)]
        names = len(values) if names_of is None else [*names_of(holder)]
        if self.unread:
            pairs = _named(names, values)
            values = [type(x) if name in self.unread and isinstance(x, (int, float)) else x for name, x in pairs]
        return values, names

    def named_values(self) -> list[tuple[Any, Any]]:
        """Return what the container holds now that may have been read, each with its name, or its number."""
        values, names = self._read()
        return _named(names, values)

    def holds(self) -> bool:
        """Return whether the container holds what it held."""
        values, names = self._read()
        if names != self.names:
            return False
        return all(map(is_, values, self.held)) or self._equal(values)

    def _equal(self, values: list[Any]) -> bool:
        """Compare plain data by its value, and remember the objects that have it now."""
        if not all(map(is_unchanged, values, self.held)):
            return False
        self.held = values
        return True

    def changes(self) -> list[Any] | None:
        """Return the names of the values that are others now; None if there are more or fewer of them."""
        values, names = self._read()
        if names != self.names:
            return None
        then = zip(self.held, _named(names, values), strict=True)
        return [name for value, (name, now) in then if not is_unchanged(now, value)]

    def changed_names(self) -> frozenset[Any]:
        """Return the names of the values that are others now, or that are or were not there."""
        values, names = self._read()
        then, now = dict(_named(self.names, self.held)), dict(_named(names, values))
        return frozenset(
            name
            for name in then.keys() | now.keys()
            if not is_unchanged(now.get(name, MISSING), then.get(name, MISSING))
        )

    def broken(self) -> list[str]:
        """Say what is not as it was."""
        names = self.changes()
        if names is None:
            return [f"{self.label} holds other objects than it did"]
        now = self.named_values()
        rows = [(name, x, then) for (name, x), then in zip(now, self.held, strict=True) if name in names]
        return [f"{self.label}[{name!r}] is {short_text(x)} and was {short_text(then)}" for name, x, then in rows]


def elements_of(owner: Any) -> list[Any]:
    """Return the objects that an array of NumPy's holds; [] if it is none, or holds numbers."""
    has_objects = isinstance(owner, (numpy.ndarray, numpy.void)) and owner.dtype.hasobject
    return list(numpy.asarray(owner).ravel().tolist()) if has_objects else []


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
        if isinstance(owner, (numpy.ndarray, numpy.void)):
            content: Any = elements_of(owner) if owner.dtype.hasobject else owner.tobytes()
            return owner.shape, str(owner.dtype), content
        if isinstance(owner, _TEXTS):
            return owner.tell(), type(owner).__name__, owner.getvalue()
        return type(owner).__name__, bytes(owner)

    def holds(self) -> bool:
        """Return whether the array has the values that it had."""
        return self._now() == self.then

    def broken(self) -> list[str]:
        """Say that the array has other values."""
        return [] if self.holds() else [f"{self.label} has other values than it had"]


@dataclass(frozen=True)
class Results:
    """The results that a function kept. It may keep others, too: a forward pass asks for those that it asked for."""

    label: str
    function: CachedFunction[Any]
    results: dict[Any, Any] = field(init=False)
    then: list[tuple[Any, Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Remember the results that the function keeps now."""
        object.__setattr__(self, "results", dict_of_results(self.function))
        object.__setattr__(self, "then", list(self.results.items()))

    def holds(self) -> bool:
        """Return whether the function still keeps the results that it kept."""
        results = self.results
        return all(results.get(key, MISSING) is value for key, value in self.then)

    def broken(self) -> list[str]:
        """Say that the function forgot results."""
        return [] if self.holds() else [f"{self.label} does not keep the results any more that it kept"]


@dataclass(frozen=True)
class ContainerGuards:
    """All containers, arrays and functions that keep their results that a trace may have read."""

    snapshots: Sequence[ContainerSnapshot]
    others: Sequence[Numbers | Results | CompiledData]

    def hold(self) -> bool:
        """Return whether all of them hold what they held."""
        if not all(map(ContainerSnapshot.holds, self.snapshots)):
            return False
        return not self.others or all(guard.holds() for guard in self.others)

    def broken(self) -> list[str]:
        """Say what is not as it was."""
        lines = [line for snapshot in self.snapshots if not snapshot.holds() for line in snapshot.broken()]
        return lines + [line for guard in self.others for line in guard.broken()]
