"""What can be reached from a value: through containers, functions and objects whose reads nobody sees."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor, nn

from ..core import code_origin
from .compiled_state import CompiledData, compiled_data, is_compiled, is_iterator
from .containers import (
    BUFFERS,
    OBJECTS_AND_FIELDS,
    OBJECTS_HELD,
    CachedFunction,
    ContainerGuards,
    ContainerReading,
    ContainerSnapshot,
    Numbers,
    Results,
    elements_of,
    names_of,
    reading_of,
    reading_of_fields,
)
from .python_state import PLAIN, is_value
from .stand_ins import Tripwire

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made, whose attributes can be set
_CLOSED = (
    *(*PLAIN, Tensor, nn.Module, type, types.ModuleType, types.CodeType),
    *(types.GeneratorType, property, staticmethod, classmethod),
)
_OF_TRACES = ("torch", "torch.fx", "torch.export", "torch.utils", "quintnet", "quintnet_compiler")


@dataclass(frozen=True)
class Unread:
    """The part of a container that a trace was shown not to read. ``names``: of values; ``only``: the names that it
    reads, if it reads neither the others nor how many there are."""

    names: frozenset[Any] = frozenset()
    only: tuple[Any, ...] | None = None


NOTHING_UNREAD = Unread()


def is_observable(value: Any) -> bool:
    """Return whether reads of the attributes of ``value`` can be recorded: its class was made by Python code, has no
    ``__getattribute__`` of its own, and does not belong to what traces."""
    kind = type(value)
    if isinstance(value, (*_CLOSED, types.FunctionType)) or not kind.__flags__ & _HEAP:
        return False
    module = str(kind.__module__)
    if module in _OF_TRACES or module.startswith(("torch._", *(f"{name}." for name in _OF_TRACES[1:]))):
        return False
    own = next(vars(base)["__getattribute__"] for base in kind.__mro__ if "__getattribute__" in vars(base))
    return isinstance(own, types.WrapperDescriptorType) or hasattr(own, RECORDS)


RECORDS = "quintnet_records"  # an attribute of the methods that record reads


def children(
    label: str, value: Any, whole: Callable[[Any], bool], unread: Unread = NOTHING_UNREAD
) -> list[tuple[str, Any]]:
    """Return what ``value`` holds, with labels; [] if it holds nothing that could be read without being recorded."""
    if isinstance(value, BUFFERS):
        return [(f"{label}[{number}]", x) for number, x in enumerate(elements_of(value))]
    if _is_closed(value, whole) or _of_library(value):
        return []
    reading = _reading(value, whole)
    if reading is None:
        return []
    pairs = reading.named_values(value)
    if unread.only is not None:
        pairs = [(name, child) for name, child in pairs if name in unread.only]
    keys = [(f"a key of {label}", name) for name, _ in pairs if not is_value(name)]
    return [*keys, *((f"{label}[{name!r}]", child) for name, child in pairs if name not in unread.names)]


def _reading(value: Any, whole: Callable[[Any], bool]) -> ContainerReading | None:
    """Return how ``value`` gives what may be read of it without being recorded; None if that is nothing."""
    reading = reading_of(value)
    if reading is not None:
        return reading
    unseen = bool(whole(value) or (not is_observable(value) and names_of(value)))
    if is_compiled(value):
        return OBJECTS_AND_FIELDS if unseen else OBJECTS_HELD
    return reading_of_fields(value) if unseen else None


def _is_closed(value: Any, whole: Callable[[Any], bool]) -> bool:
    """Return whether nothing is looked into of ``value``.

    Of a module, unless all its attributes may have been read; of a function in C, unless it is the method of an object,
    as ``config.get`` of a dict.
    """
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(value.__self__, (types.ModuleType, type, type(None)))
    if isinstance(value, PLAIN):
        return is_value(value)
    return isinstance(value, _CLOSED) and not (isinstance(value, nn.Module) and whole(value))


def _of_library(value: Any) -> bool:
    """Return whether ``value`` is a function of torch, of this package or of Python's own library."""
    if not isinstance(value, types.FunctionType):
        return False
    file = value.__code__.co_filename
    if file.startswith((code_origin.TORCH, code_origin.PACKAGE, "<frozen")):
        return True
    return file.startswith(code_origin.STDLIB) and "-packages" not in file


def reachable(
    roots: Iterable[tuple[str, Any]], whole: Callable[[Any], bool], unread: Mapping[int, Unread]
) -> Iterator[tuple[str, Any]]:
    """Yield ``roots`` and all that they hold, each object once, with labels."""
    pending, seen = list(roots), set[int]()
    kept: list[Any] = []  # no number is given to another object meanwhile
    while pending:
        label, value = pending.pop()
        if issubclass(type(value), Tripwire) or is_value(value) or id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        yield label, value
        pending += children(label, value, whole, unread.get(id(value), NOTHING_UNREAD))


def container_guards(
    roots: Iterable[tuple[str, Any]], whole: Callable[[Any], bool], unread: Mapping[int, Unread]
) -> ContainerGuards:
    """Return guards of all containers and arrays that can be reached from ``roots``."""
    snapshots: list[ContainerSnapshot] = []
    others: list[Numbers | Results | CompiledData] = []
    for label, value in reachable(roots, whole, unread):
        if isinstance(value, BUFFERS):
            others.append(Numbers(label, value))
            continue
        if isinstance(value, CachedFunction):
            others.append(Results(label, value))
            continue
        if _is_closed(value, whole) or _of_library(value):
            continue
        has_data = is_compiled(value) and reading_of(value) is None and not is_iterator(value)
        if (has_data or isinstance(value, Generator)) and compiled_data(value):
            others.append(CompiledData(label, value))
        reading = _reading(value, whole)
        if reading is not None:
            part = unread.get(id(value), NOTHING_UNREAD)
            snapshots.append(ContainerSnapshot(label, value, reading, part.names, part.only))
    return ContainerGuards(snapshots, others)
