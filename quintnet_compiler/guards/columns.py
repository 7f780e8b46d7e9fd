"""Guards of many values of one kind, as columns that C code compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, contains, getitem, is_
from typing import Any, Protocol

from torch import Tensor

from ..compat.torch import version
from .python_state import MISSING, copied, shown

Space = Mapping[str, Any]
Row = tuple[str, Space, Any, Any]  # a label, a namespace, a name in it, and the value there

_FLAG = attrgetter("requires_grad")
_SHAPE = attrgetter("shape")


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
    """``spaces[i][names[i]]`` equals ``values[i]``, and has its type (1, 1.0 and True are equal)."""

    labels: tuple[str, ...]
    spaces: tuple[Space, ...]
    names: tuple[Any, ...]
    values: list[Any]
    kinds: list[type]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PlainValues:
        """Return guards of the values that these rows have now."""
        labels, spaces, names, values = _columns(rows)
        copies = list(map(copied, values))
        return cls(labels, spaces, names, copies, list(map(type, copies)))

    def hold(self) -> bool:
        values = list(map(getitem, self.spaces, self.names))
        return values == self.values and list(map(type, values)) == self.kinds

    def broken(self) -> list[str]:
        rows = zip(self.labels, self.spaces, self.names, self.values, self.kinds, strict=True)
        return [
            f"{label} is {shown(_get(space, name))} and was {shown(value)}"
            for label, space, name, value, kind in rows
            if type(_get(space, name)) is not kind or not equal(_get(space, name), value)
        ]


@dataclass(frozen=True)
class SameObjects:
    """``spaces[i][names[i]]`` is the object ``values[i]``."""

    labels: tuple[str, ...]
    spaces: tuple[Space, ...]
    names: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> SameObjects:
        """Return guards of the objects that these rows have now."""
        return cls(*_columns(rows))

    def hold(self) -> bool:
        return all(map(is_, map(getitem, self.spaces, self.names), self.values))

    def broken(self) -> list[str]:
        rows = zip(self.labels, self.spaces, self.names, self.values, strict=True)
        return [f"{label} is another object" for label, space, name, value in rows if _get(space, name) is not value]


@dataclass(frozen=True)
class Absent:
    """Names that namespaces do not have (because a class has them, or nobody), and attributes that classes do not."""

    labels: tuple[str, ...]
    spaces: tuple[Space, ...]
    names: tuple[str, ...]
    classes: tuple[tuple[type, str], ...]
    many: tuple[tuple[str, frozenset[str], Space], ...]  # a label, names, and a namespace that has none of them

    def hold(self) -> bool:
        if any(map(contains, self.spaces, self.names)):
            return False
        for kind, name in self.classes:
            if hasattr(kind, name):
                return False
        for _, names, space in self.many:  # noqa: SIM110 -- a generator makes a call for each
            if not names.isdisjoint(space):
                return False
        return True

    def broken(self) -> list[str]:
        rows = zip(self.labels, self.spaces, self.names, strict=True)
        lines = [f"{label} is {shown(space[name])} and was nothing" for label, space, name in rows if name in space]
        lines += [f"{kind.__name__}.{name} was not there" for kind, name in self.classes if hasattr(kind, name)]
        new = ((label, space, name) for label, names, space in self.many for name in sorted(names & space.keys()))
        return lines + [f"{label}.{name} is {shown(space[name])} and was nothing" for label, space, name in new]


@dataclass(frozen=True)
class Constants:
    """Tensors that are constant in the graph: nobody wrote to ``tensors``; ``stored``, these and others that have
    memory of their own, are where they were, and have the shapes that they had."""

    tensors: tuple[Tensor, ...]
    versions: list[int]
    stored: tuple[Tensor, ...]
    pointers: list[int] = field(init=False)
    shapes: list[Any] = field(init=False)

    @classmethod
    def of(cls, tensors: Iterable[tuple[Tensor, int]], others: Iterable[Tensor] = ()) -> Constants:
        """Return guards of tensors with their versions when they were read; the values of ``others`` may change."""
        rows = tuple(tensors)
        own = tuple(x for x, _ in rows)
        return cls(own, [number for _, number in rows], tuple(x for x in (*own, *others) if pointer(x) is not None))

    def __post_init__(self) -> None:
        object.__setattr__(self, "pointers", list(map(Tensor.data_ptr, self.stored)))
        object.__setattr__(self, "shapes", list(map(_SHAPE, self.stored)))

    def hold(self) -> bool:
        return (
            list(map(version, self.tensors)) == self.versions
            and list(map(Tensor.data_ptr, self.stored)) == self.pointers
            and list(map(_SHAPE, self.stored)) == self.shapes
        )

    def broken(self) -> list[str]:
        return [] if self.hold() else ["a tensor that forward uses as a constant was changed in place"]


def pointer(x: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none that can be asked for."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Parts:
    """The modules inside of modules, one module after the other."""

    labels: tuple[str, ...]
    spaces: tuple[dict[str, Any], ...]
    counts: list[int]
    modules: list[Any]

    @classmethod
    def of(cls, rows: Sequence[tuple[str, dict[str, Any]]]) -> Parts:
        """Return guards of the parts that these modules have now."""
        spaces = tuple(space for _, space in rows)
        modules = [module for space in spaces for module in space.values()]
        return cls(tuple(label for label, _ in rows), spaces, list(map(len, spaces)), modules)

    def hold(self) -> bool:
        return (
            list(map(len, self.spaces)) == self.counts
            and list(chain.from_iterable(map(dict.values, self.spaces))) == self.modules
        )

    def broken(self) -> list[str]:
        then = iter(self.modules)
        rows = zip(self.labels, self.spaces, self.counts, strict=True)
        return [
            f"{label or 'the model'} has other parts than it had"
            for label, space, count in rows
            if list(space.values()) != list(islice(then, count))
        ]


@dataclass(frozen=True)
class Flags:
    """Which parameters require gradients: ``spaces[i][keys[i]]`` (others may be there than there were)."""

    names: tuple[str, ...]
    spaces: tuple[Space, ...]
    keys: tuple[str, ...]
    values: list[bool]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are there now."""
        return list(map(getitem, self.spaces, self.keys))

    def hold_for(self, parameters: list[Tensor]) -> bool:
        """Return whether these parameters, which are there now, have the flags that they had."""
        return list(map(_FLAG, parameters)) == self.values

    def broken(self) -> list[str]:
        rows = zip(self.names, self.spaces, self.keys, self.values, strict=True)
        return [
            f"{name}.requires_grad is {not flag} and was {flag}"
            for name, space, key, flag in rows
            if getattr(space.get(key), "requires_grad", not flag) != flag
        ]


@dataclass(frozen=True)
class Modes:
    """What ``read`` returned when the trace began."""

    read: Callable[[], tuple[Any, ...]]
    values: tuple[Any, ...]

    def hold(self) -> bool:
        return self.read() == self.values

    def broken(self) -> list[str]:
        now = self.read()
        return [] if now == self.values else [f"the modes of torch are {now} and were {self.values}"]


def _get(space: Space, name: Any) -> Any:
    try:
        return space[name]
    except (KeyError, AttributeError, ValueError):
        return MISSING


def _columns(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[Space, ...], tuple[Any, ...], tuple[Any, ...]]:
    labels, spaces, names, values = tuple(zip(*rows, strict=True)) or ((), (), (), ())
    return labels, spaces, names, values
