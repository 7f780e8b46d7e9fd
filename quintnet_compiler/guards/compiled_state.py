"""Guards of objects whose classes are written in C: of the objects that they refer to, and of what ``pickle`` reads.

An exception, an element of an XML tree and a decimal context are compared before each step. Generators of random
numbers and iterators show by it that a trace took something of them.
"""

from __future__ import annotations

import ctypes
import gc
import io
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
from torch import Generator

from ..compat.torch import without_torch_function
from .python_state import PLAIN, Change, is_simple

MAX_BYTES = 1 << 16  # of data that is compared; what is larger, as a tokenizer, counts by its identity
_NOT_HELD = (type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType)
_POINTERS: tuple[Any, ...] = (
    *ctypes.POINTER(ctypes.c_int).__bases__, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.c_void_p, ctypes.py_object,
)  # fmt: skip


def is_compiled(value: Any) -> bool:
    """Return whether Python code did not write all classes of an object, so that it may hold more than attributes.

    Plain data and the objects of torch do not count.
    """
    kind = type(value)
    if isinstance(value, (*PLAIN, *_NOT_HELD)) or kind in weakref.ProxyTypes:
        return False
    bases = [base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)]
    return bases[:1] != [object] and not any(str(base.__module__).partition(".")[0] == "torch" for base in bases)


def objects_held(value: Any) -> list[Any]:
    """Return the objects that one of a compiled class refers to, but for its attributes in Python."""
    fields = getattr(value, "__dict__", None)
    return [x for x in gc.get_referents(value) if x is not fields and not isinstance(x, _NOT_HELD)]


def compiled_data(value: Any) -> tuple[Any, ...]:
    """Return the plain data of which ``pickle`` would make a compiled object again; () if there is none."""
    kind = type(value)
    if isinstance(value, Generator):
        with without_torch_function():
            state = value.get_state().untyped_storage()  # as modes of a trace would see an operator
        return value.initial_seed(), ctypes.string_at(state.data_ptr(), state.nbytes())
    methods = [getattr(kind, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")]
    if methods == _METHODS_OF_OBJECT:
        return ()
    try:
        parts = value.__reduce_ex__(2)
    except Exception:  # the usual answer of what cannot be pickled is a TypeError, but any class may give another
        return ()
    fields = getattr(value, "__dict__", None)
    rows = tuple(_plain_parts(x for x in parts if x is not fields)) if isinstance(parts, tuple) else (parts,)
    size = sum(len(x) if isinstance(x, (str, bytes)) else 8 for x in rows)
    return rows if size <= MAX_BYTES else ()


_METHODS_OF_OBJECT = [getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__")]


def _plain_parts(parts: Any) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, (tuple, list)):
            yield from _plain_parts(part)
        elif isinstance(part, dict):
            yield from _plain_parts(part.items())
        elif isinstance(part, numpy.ndarray) and not part.dtype.hasobject:
            yield part.tobytes()
        elif is_simple(part):
            yield part


def is_iterator(value: Any) -> bool:
    """Return whether ``value`` gives another value each time that it is asked.

    Files do not count, nor what goes over an array (``array.flat``), which can be read by index; a weak proxy is what
    it stands for.
    """
    kind = value.__class__ if type(value) in weakref.ProxyTypes else type(value)
    return issubclass(kind, Iterator) and not issubclass(kind, (io.IOBase, numpy.flatiter))


def iteration_state(value: Any) -> tuple[Any, ...]:
    """Return what changes where somebody takes a value of an iterator, or draws from a generator of random numbers.

    An iterator may take its values from others, which functions may hold.
    """
    if not is_iterator(value):
        return (value.index,) if isinstance(value, numpy.flatiter) else compiled_data(value)
    pending, seen, parts = [value], set[int](), list[Any]()
    while pending:
        part = pending.pop()
        parts.append(id(part))
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, types.GeneratorType) and part.gi_frame is not None:
            parts.append(part.gi_frame.f_lasti)
        if is_iterator(part):
            parts += compiled_data(part)
        if is_iterator(part) or isinstance(part, (tuple, types.CellType)):
            pending += objects_held(part)
        elif isinstance(part, types.FunctionType):
            pending += [*(part.__defaults__ or ()), *(part.__closure__ or ())]
    return tuple(parts)


def is_pointer(value: Any) -> bool:
    """Return whether ``value`` is or holds a pointer of ctypes that points somewhere: nobody can tell to how much."""
    if isinstance(value, _POINTERS):
        return any(bytes(value))
    if isinstance(value, ctypes.Array):
        return any(map(is_pointer, value)) if isinstance(next(iter(value), 0), _PARTS) else False
    names = [name for name, *_ in getattr(value, "_fields_", ())] if isinstance(value, _RECORDS) else []
    return any(is_pointer(getattr(value, name)) for name in names)


_RECORDS = (ctypes.Structure, ctypes.Union)
_PARTS = (*_POINTERS, *_RECORDS, ctypes.Array)  # of arrays; simple numbers are Python's there


@dataclass(frozen=True)
class CompiledData:
    """The data of an object of a compiled class, as it was."""

    label: str
    owner: Any
    then: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Take the data of now."""
        object.__setattr__(self, "then", compiled_data(self.owner))

    def holds(self) -> bool:
        """Return whether the object has the data that it had."""
        return compiled_data(self.owner) == self.then

    def broken(self) -> list[str]:
        """Say that the object has other data."""
        return [] if self.holds() else [f"{self.label}, a {type(self.owner).__name__}, is not in the state that it was"]


@dataclass(frozen=True)
class IterationState:
    """The position of an iterator or a generator of random numbers before a trace, and its state if it can be set."""

    label: str
    owner: Any
    then: tuple[Any, ...]
    state: Any = None

    @classmethod
    def of(cls, label: str, owner: Any) -> IterationState:
        """Return the position of now."""
        state = None
        if isinstance(owner, Generator):
            state = owner.get_state()
        elif not is_iterator(owner) and hasattr(owner, "__setstate__") and compiled_data(owner):
            parts = owner.__reduce_ex__(2)
            state = parts[2] if len(parts) > 2 else None
        return cls(label, owner, iteration_state(owner), state)

    def has_moved(self) -> bool:
        """Return whether something was taken of it."""
        return iteration_state(self.owner) != self.then

    def change(self) -> Change:
        """Return what to say of it."""
        return Change(f"the state of {self.label!r}, a {type(self.owner).__name__}", None, None, self.has_moved)

    def restore(self) -> None:
        """Put a generator of random numbers back; iterators cannot be."""
        if self.state is None or not self.has_moved():
            return
        put = self.owner.set_state if isinstance(self.owner, Generator) else self.owner.__setstate__
        put(self.state)
