"""Guards of many values of one kind, compared in loops without calls: before each step, and mostly nothing changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, getitem, is_, not_
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..compat.torch import version
from .namespaces import MISSING
from .python_state import copied, other_zero, same_values, shown

Space = Mapping[str, Any]
Row = tuple[str, Space, Any, Any]  # a label, a namespace, a name in it, and the value there

_T = TypeVar("_T")

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


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; False if they cannot be compared."""
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


@dataclass(frozen=True)
class PlainValues:
    """Names whose values equal those of ``rows``, and have their types (1, 1.0 and True are equal).

    ``rows``: of values that cannot change in place, by four. ``objects``: of each four, the namespaces, names, and the
    objects that had the values last, which need no comparison. ``in_place``: of values that can change in place.
    """

    rows: tuple[tuple[Row, Row, Row, Row], ...]
    objects: list[tuple[Any, ...]]
    in_place: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PlainValues:
        """Return guards of the values that these rows have now."""
        fixed = _by_four([row for row in rows if copied(row[-1]) is row[-1]])
        copies = tuple((*row[:-1], copied(row[-1])) for row in rows if copied(row[-1]) is not row[-1])
        return cls(fixed, [tuple(x for row in group for x in row[1:]) for group in fixed], copies)

    def hold(self) -> bool:
        for a, b, x, c, d, y, e, f, z, g, h, w in self.objects:
            if a[b] is not x or c[d] is not y or e[f] is not z or g[h] is not w:
                return self._equal()
        return not self.in_place or _all_equal(self.in_place)

    def _equal(self) -> bool:
        """Compare what are other objects now by their values, and remember them."""
        for index, objects in enumerate(self.objects):
            if any(space[name] is not x for space, name, x in zip(*[iter(objects)] * 3, strict=True)):
                group = self.rows[index]
                if not _all_equal(group):
                    return False
                self.objects[index] = tuple(x for row in group for x in _unchangeable(row))
        return _all_equal(self.in_place)

    def broken(self) -> list[str]:
        lines = (
            f"{label} is {shown(_get(space, name))} and was {shown(value)}"
            for label, space, name, value in (*chain.from_iterable(self.rows), *self.in_place)
            if not _is_equal(_get(space, name), value)
        )
        return list(dict.fromkeys(lines))


def _by_four(items: Sequence[_T]) -> tuple[tuple[_T, _T, _T, _T], ...]:
    """Return items by four, the last one again where some are missing: a loop over them has a fourth of the steps."""
    filled = [*items, *[items[-1]] * (-len(items) % 4)] if items else []
    return tuple(zip(filled[::4], filled[1::4], filled[2::4], filled[3::4], strict=True))


def _unchangeable(row: Row) -> tuple[Space, Any, Any]:
    """Return a namespace, a name, and the object that is there now; another one, if that can change in place."""
    _, space, name, _ = row
    return space, name, space[name] if copied(space[name]) is space[name] else MISSING


def _all_equal(rows: Iterable[Row]) -> bool:
    for _, space, name, value in rows:  # noqa: SIM110 -- a generator makes a call for each
        if not _is_equal(space[name], value):
            return False
    return True


def _is_equal(now: Any, then: Any) -> bool:
    return type(now) is type(then) and equal(now, then) and not other_zero(now, then)


@dataclass(frozen=True)
class SameObjects:
    """Names whose values are the very objects of ``rows``."""

    rows: tuple[Row, ...]

    def hold(self) -> bool:
        for _, space, name, value in self.rows:  # noqa: SIM110 -- a generator makes a call for each
            if space[name] is not value:
                return False
        return True

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

    ``rows``: a label, a namespace, and the name. ``many``: a label, names, and a namespace that has none of them.
    ``by_name``: each name of ``rows``, and the namespaces that do not have it, by four. ``held``: all names that each
    namespace of ``many`` had last.
    """

    rows: tuple[tuple[str, Space, str], ...]
    classes: tuple[tuple[type, str], ...]
    many: tuple[tuple[str, frozenset[str], Space], ...]
    by_name: dict[str, Sequence[tuple[Space, Space, Space, Space]]] = field(init=False)
    held: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        """Group the rows by their names."""
        spaces: dict[str, list[Space]] = {}
        for _, space, name in self.rows:
            spaces.setdefault(name, []).append(space)
        object.__setattr__(self, "by_name", {name: _by_four(items) for name, items in spaces.items()})
        object.__setattr__(self, "held", [[*space] for _, _, space in self.many])

    def hold(self) -> bool:
        for name, spaces in self.by_name.items():
            for a, b, c, d in spaces:
                if name in a or name in b or name in c or name in d:
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
            f"{label} is {shown(space[name])} and was nothing" for label, space, name in self.rows if name in space
        ]
        lines += [f"{kind.__name__}.{name} was not there" for kind, name in self.classes if hasattr(kind, name)]
        new = ((label, space, name) for label, names, space in self.many for name in sorted(names & space.keys()))
        return lines + [f"{label}.{name} is {shown(space[name])} and was nothing" for label, space, name in new]


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
    """The flags ``requires_grad`` of parameters: ``spaces[i][keys[i]]`` (others may be there than there were).

    ``trained``: the places of those that do; ``frozen``: of the others.
    """

    names: tuple[str, ...]
    spaces: tuple[Space, ...]
    keys: tuple[str, ...]
    values: list[bool]
    trained: tuple[tuple[Space, str], ...] = field(init=False)
    frozen: tuple[tuple[Space, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Separate the places of what is trained from those of the others."""
        places = list(zip(self.spaces, self.keys, strict=True))
        frozen = map(not_, self.values)
        object.__setattr__(self, "trained", tuple(compress(places, self.values)))
        object.__setattr__(self, "frozen", tuple(compress(places, frozen)))

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
