"""Guards of many values of one kind, compared in loops without calls: before each step, and mostly nothing changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter, getitem, is_
from typing import Any, Protocol

from torch import Tensor

from ..compat.torch import version
from .namespaces import MISSING
from .python_state import copied, other_zero, same_values, short_text

Space = Mapping[str, Any]
Row = tuple[str, Space, Any, Any]  # a label, a namespace, a name in it, and the value there

_FLAG = attrgetter("requires_grad")
_SHAPE = attrgetter("shape")
_MRO = attrgetter("__mro__")


class TraceGuard(Protocol):
    """Something that must be as a trace saw it."""

    def hold(self) -> bool:
        """Return whether it is."""
        ...

    def broken(self) -> list[str]:
        """Say what is not as it was, with the value before and now."""
        ...


class DictGuard(TraceGuard, Protocol):
    """A guard that mostly looks at classes and in dicts, which need no look where nobody wrote to them."""

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that is not in dicts and objects with these ids, or changes without a write."""


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; False if they cannot be compared."""
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


@dataclass(frozen=True)
class PlainValues:
    """Names whose values equal those of ``rows``, and have their types (1, 1.0 and True are equal)."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PlainValues:
        """Return guards of the values that these rows have now: copies, of those that can change in place."""
        return cls(tuple((*row[:-1], copied(row[-1])) for row in rows))

    def hold(self) -> bool:
        for _, space, name, value in self.rows:
            now = space[name]
            if now is not value and not _is_equal(now, value):
                return False
        return True

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        rows = (row for row in self.rows if id(row[1]) not in ids or copied(row[-1]) is not row[-1])
        return PlainValues(tuple(rows)).hold

    def broken(self) -> list[str]:
        lines = (
            f"{label} is {short_text(_get(space, name))} and was {short_text(value)}"
            for label, space, name, value in self.rows
            if not _is_equal(_get(space, name), value)
        )
        return list(dict.fromkeys(lines))


def _is_equal(now: Any, then: Any) -> bool:
    same_change = (copied(now) is now) == (copied(then) is then)  # whether they can change in place
    return type(now) is type(then) and equal(now, then) and not other_zero(now, then) and same_change


@dataclass(frozen=True)
class SameObjects:
    """Names whose values are the very objects of ``rows``."""

    rows: tuple[Row, ...]

    def hold(self) -> bool:
        for _, space, name, value in self.rows:  # noqa: SIM110 -- a generator makes a call for each
            if space[name] is not value:
                return False
        return True

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        return SameObjects(tuple(row for row in self.rows if id(row[1]) not in ids)).hold

    def broken(self) -> list[str]:
        return [
            f"{label} is another object" for label, space, name, value in self.rows if _get(space, name) is not value
        ]


@dataclass(frozen=True)
class Kinds:
    """Objects are of the classes that they were of, and these have the base classes that they had."""

    labels: tuple[str, ...]
    owners: tuple[Any, ...]
    kinds: list[type]
    distinct: tuple[type, ...]
    bases: list[tuple[type, ...]]  # of each of the distinct ones, in the order in which Python looks

    @classmethod
    def of(cls, rows: Iterable[tuple[str, Any]]) -> Kinds:
        """Return guards of the classes that labelled objects have now."""
        owners = {id(owner): (label, owner) for label, owner in rows}
        labels, objects = tuple(zip(*owners.values(), strict=True)) or ((), ())
        kinds = list(map(type, objects))
        distinct = tuple(dict.fromkeys(kinds))
        return cls(labels, objects, kinds, distinct, list(map(_MRO, distinct)))

    def hold(self) -> bool:
        return list(map(type, self.owners)) == self.kinds and list(map(_MRO, self.distinct)) == self.bases

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        places = [i for i, owner in enumerate(self.owners) if id(owner) not in ids]
        labels, owners = (tuple(column[i] for i in places) for column in (self.labels, self.owners))
        return Kinds(labels, owners, [self.kinds[i] for i in places], self.distinct, self.bases).hold

    def broken(self) -> list[str]:
        rows = zip(self.labels, self.owners, self.kinds, strict=True)
        others = [kind for kind, bases in zip(self.distinct, self.bases, strict=True) if kind.__mro__ != bases]
        return [f"{kind.__name__} has other base classes than it had" for kind in others] + [
            f"{label or 'the model'} is a {type(owner).__name__} and was a {kind.__name__}"
            for label, owner, kind in rows
            if type(owner) is not kind
        ]


@dataclass(frozen=True)
class Absent:
    """Names that namespaces do not have (because a class has them, or nobody), and attributes that classes do not.

    ``many``: a label, names, and a namespace that has none of them; ``held``: all names that each of these had last.
    """

    rows: tuple[tuple[str, Space, str], ...]
    classes: tuple[tuple[type, str], ...]
    many: tuple[tuple[str, frozenset[str], Space], ...]
    held: list[list[str]] = field(default_factory=list)

    def outside(self, ids: Set[int]) -> Callable[[], bool]:
        """Return what compares all that needs a look in each step."""
        return Absent(tuple(row for row in self.rows if id(row[1]) not in ids), self.classes, self.many).hold

    def hold(self) -> bool:
        for _, space, name in self.rows:
            if name in space:
                return False
        for kind, name in self.classes:
            if hasattr(kind, name):
                return False
        return not self.many or [[*space] for _, _, space in self.many] == self.held or self._none_of_many()

    def _none_of_many(self) -> bool:
        """Return whether no namespace has a name that it must not have, and remember the names that it has."""
        if not all(names.isdisjoint(space) for _, names, space in self.many):
            return False
        self.held[:] = [[*space] for _, _, space in self.many]
        return True

    def broken(self) -> list[str]:
        lines = [
            f"{label} is {short_text(space[name])} and was nothing" for label, space, name in self.rows if name in space
        ]
        lines += [f"{kind.__name__}.{name} was not there" for kind, name in self.classes if hasattr(kind, name)]
        new = ((label, space, name) for label, names, space in self.many for name in sorted(names & space.keys()))
        return lines + [f"{label}.{name} is {short_text(space[name])} and was nothing" for label, space, name in new]


@dataclass(frozen=True)
class Constants:
    """Tensors that are constant in the graph: nobody wrote to ``tensors``, nor gave them other attributes; ``stored``,
    these and others that have memory of their own, are where they were, and have the shapes that they had."""

    tensors: tuple[Tensor, ...]
    versions: list[int]
    stored: tuple[Tensor, ...]
    pointers: list[int] = field(init=False)
    shapes: list[Any] = field(init=False)
    flags: list[bool] = field(init=False)
    fields: tuple[dict[str, Any], ...] = field(init=False)
    attributes: list[Any] = field(init=False)  # what all of these hold, as Python's collector of garbage lists it

    @classmethod
    def of(cls, tensors: Iterable[tuple[Tensor, int]], others: Iterable[Tensor] = ()) -> Constants:
        """Return guards of tensors with their versions when they were read; the values of ``others`` may change."""
        rows = tuple(tensors)
        own = tuple(x for x, _ in rows)
        return cls(own, [number for _, number in rows], tuple(x for x in (*own, *others) if pointer(x) is not None))

    def __post_init__(self) -> None:
        object.__setattr__(self, "pointers", list(map(Tensor.data_ptr, self.stored)))
        object.__setattr__(self, "shapes", list(map(_SHAPE, self.stored)))
        object.__setattr__(self, "flags", list(map(_FLAG, self.tensors)))
        object.__setattr__(self, "fields", tuple(map(vars, self.tensors)))
        object.__setattr__(self, "attributes", gc.get_referents(*self.fields))

    def hold(self) -> bool:
        return not (self.tensors or self.stored) or (
            list(map(version, self.tensors)) == self.versions
            and list(map(Tensor.data_ptr, self.stored)) == self.pointers
            and list(map(_SHAPE, self.stored)) == self.shapes
            and self._attributes_hold()
        )

    def _attributes_hold(self) -> bool:
        """Return whether the tensors have the flags ``requires_grad``, and the attributes of users, that they had."""
        now, same_flags = gc.get_referents(*self.fields), list(map(_FLAG, self.tensors)) == self.flags
        return same_flags and len(now) == len(self.attributes) and all(map(is_, now, self.attributes))

    def broken(self) -> list[str]:
        if not (self.tensors or self.stored) or self.hold():
            return []
        how = "was changed in place" if self._attributes_hold() else "has other attributes than it had"
        return [f"a tensor that forward uses as a constant {how}"]


@dataclass(frozen=True)
class Values:
    """See that tensors, whose values became Python numbers, have these ``values``: others may write to that memory."""

    compared: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Values:
        """Return guards of the values that these tensors have now, but for those on accelerators."""
        on_host = tuple(x.detach() for x in tensors if x.device.type == "cpu")
        return cls(on_host, tuple(x.clone() for x in on_host))

    def hold(self) -> bool:
        """Return whether they have these values."""
        return all(map(same_values, self.compared, self.values))

    def broken(self) -> list[str]:
        """Say that they have others."""
        return [] if self.hold() else ["a tensor that forward reads in Python has other values"]


def pointer(x: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none that can be asked for."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Flags:
    """The flags ``requires_grad`` of parameters: ``spaces[i][keys[i]]`` (others may be there than there were)."""

    names: tuple[str, ...]
    spaces: tuple[Space, ...]
    keys: tuple[str, ...]
    values: list[bool]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are there now."""
        return list(map(getitem, self.spaces, self.keys))

    def hold(self) -> bool:
        """Return whether the parameters that are there now have the flags that they had."""
        return list(map(_FLAG, self.parameters)) == self.values

    def broken(self) -> list[str]:
        rows = zip(self.names, self.spaces, self.keys, self.values, strict=True)
        return [
            f"{name}.requires_grad is {not flag} and was {flag}"
            for name, space, key, flag in rows
            if getattr(space.get(key), "requires_grad", not flag) != flag
        ]


@dataclass(frozen=True)
class Modes:
    """Modes of torch: what ``read`` returned when the trace began."""

    read: Callable[[], tuple[Any, ...]]
    values: tuple[Any, ...]

    def hold(self) -> bool:
        """Return whether it returns the same now."""
        return self.read() == self.values

    def broken(self) -> list[str]:
        """Say what it returned then, and returns now."""
        now = self.read()
        return [] if now == self.values else [f"the modes of torch are {now} and were {self.values}"]


def _get(space: Space, name: Any) -> Any:
    try:
        return space[name]
    except (KeyError, AttributeError, ValueError):
        return MISSING
