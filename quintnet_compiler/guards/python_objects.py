"""What Python objects hold, wherever a module or a loss function reaches them: kept while a module is traced, or runs
beside its program, and put back."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .stand_ins import StandIn

_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, Tensor)
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "quintnet", "quintnet_compiler"}
_FOLLOWED = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, functools.partial, nn.Module)
_CONTAINERS = (dict, list, set, deque)
_MISSING = object()


@contextlib.contextmanager
def objects_kept(roots: Mapping[str, Any]) -> Iterator[ObjectSnapshot]:
    """Inside, what ``roots`` reach may change; afterwards it is as it was."""
    snapshot = ObjectSnapshot.of(roots)
    try:
        yield snapshot
    finally:
        snapshot.restore()


@dataclass
class ObjectSnapshot:
    """The contents of objects and containers by the labels of their places, as they were."""

    held: list[_Contents] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)  # keeps what has an id alive

    @classmethod
    def of(cls, roots: Mapping[str, Any]) -> ObjectSnapshot:
        """Remember everything that values reach through attributes, containers, closures, and variables of modules that
        functions read. Objects of torch, NumPy and the standard library are not looked into, but for containers and
        namespaces; nor are variables that code of libraries reads."""
        snapshot = cls()
        todo = list(roots.items())
        while todo:
            label, value = todo.pop()
            if issubclass(type(value), (StandIn, *_LEAVES)) or id(value) in snapshot._seen:
                continue
            snapshot._seen[id(value)] = value
            todo += snapshot._held_by(label, value)
        return snapshot

    def restore(self) -> list[str]:
        """Put everything back, and return the labels of what had changed."""
        return [label for contents in self.held for label in contents.restore()]

    def _held_by(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What a value holds, by label. What can change is remembered."""
        if isinstance(value, _CONTAINERS):
            self.held.append(_Container(label, value, _content(value)))
        if isinstance(value, dict):
            yield from ((f"{label}[{key!r}]", x) for key, x in dict.items(value) if not isinstance(x, _LEAVES))
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            yield from ((f"{label}[{i}]", x) for i, x in enumerate(value) if not isinstance(x, _LEAVES))
        elif isinstance(value, types.FunctionType):
            yield from self._read_by(label, value)
            return
        elif isinstance(value, types.MethodType):
            yield from ((label, value.__func__), (label, value.__self__))
            return
        elif isinstance(value, functools.partial):
            yield from ((label, value.func), (label, value.args), (label, value.keywords))
        elif _is_array(value):
            self.held.append(_Array(label, value, value.copy()))
            return
        yield from self._attributes(label, value)

    def _attributes(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        library = str(kind.__module__).partition(".")[0] in _LIBRARIES
        if library and not isinstance(value, (*_FOLLOWED, *_CONTAINERS)):
            return
        own = {name: x for name in _slots(kind) if (x := getattr(value, name, _MISSING)) is not _MISSING}
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            own |= fields
        if own or isinstance(fields, dict):
            self.held.append(_Attributes(label, value, own))
        yield from self._classes(kind)
        yield from ((f"{label}.{name}".strip("."), x) for name, x in own.items() if not isinstance(x, _LEAVES))

    def _classes(self, kind: type) -> Iterator[tuple[str, Any]]:
        """The functions of classes, whose own data is remembered."""
        for one in kind.__mro__:
            if id(one) in self._seen or str(one.__module__).partition(".")[0] in _LIBRARIES:
                continue
            self._seen[id(one)] = one
            own = {name: x for name, x in vars(one).items() if not name.startswith("__")}
            yield from ((one.__name__, x) for x in own.values() if isinstance(x, types.FunctionType))
            data = {name: x for name, x in own.items() if not hasattr(type(x), "__get__")}
            self.held.append(_ClassData(one.__name__, one, data))
            yield from ((f"{one.__name__}.{name}", x) for name, x in data.items() if isinstance(x, _CONTAINERS))

    def _read_by(self, label: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """What a function keeps, and the variables that it reads."""
        names = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in names.items():
            self.held.append(_Cell(name, cell, _cell(cell)))
            yield name, _cell(cell)
        yield from ((label, x) for x in (function.__defaults__, function.__kwdefaults__, function.__dict__) if x)
        if function.__module__ is None or function.__module__.partition(".")[0] in _LIBRARIES:
            return
        if "site-packages" in function.__code__.co_filename:
            return
        read = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        if read:
            self.held.append(_Variables(label, function.__globals__, read))
        yield from read.items()


class _Contents:
    def restore(self) -> Iterator[str]:
        raise NotImplementedError


@dataclass
class _Container(_Contents):
    label: str
    value: Any
    content: Any

    def restore(self) -> Iterator[str]:
        now = _content(self.value)
        if len(now) == len(self.content) and all(a is b for a, b in zip(_flat(now), _flat(self.content), strict=True)):
            return
        yield self.label
        self.value.clear()
        if isinstance(self.value, (list, deque)):
            self.value.extend(self.content)
        else:
            self.value.update(self.content)


@dataclass
class _Attributes(_Contents):
    label: str
    value: Any
    own: dict[str, Any]

    def restore(self) -> Iterator[str]:
        fields = getattr(self.value, "__dict__", {})
        for name in [*self.own, *(name for name in list(fields) if name not in self.own)]:
            then = self.own.get(name, _MISSING)
            now = fields[name] if name in fields else _slot(self.value, name)
            if now is then:
                continue
            yield f"{self.label}.{name}".strip(".")
            if then is _MISSING:
                del fields[name]
            elif name in fields or name not in _slots(type(self.value)):
                fields[name] = then
            else:
                object.__setattr__(self.value, name, then)


@dataclass
class _ClassData(_Contents):
    label: str
    kind: type
    own: dict[str, Any]

    def restore(self) -> Iterator[str]:
        for name, then in self.own.items():
            if vars(self.kind).get(name, _MISSING) is not then:
                yield f"{self.label}.{name}"
                setattr(self.kind, name, then)


@dataclass
class _Variables(_Contents):
    label: str
    space: dict[str, Any]
    own: dict[str, Any]

    def restore(self) -> Iterator[str]:
        for name, then in self.own.items():
            if self.space.get(name, _MISSING) is not then:
                yield name
                self.space[name] = then


@dataclass
class _Cell(_Contents):
    label: str
    cell: Any
    then: Any

    def restore(self) -> Iterator[str]:
        if _cell(self.cell) is self.then:
            return
        yield self.label
        if self.then is _MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.then


@dataclass
class _Array(_Contents):
    label: str
    value: Any
    then: Any

    def restore(self) -> Iterator[str]:
        if self.value.tobytes() != self.then.tobytes():
            yield self.label
            self.value[...] = self.then


def _content(value: Any) -> Any:
    """A plain copy of a container, whatever a subclass makes of ``copy``."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return set(value) if isinstance(value, set) else list(value)


def _flat(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return [*content, *content.values()]
    return sorted(content, key=id) if isinstance(content, set) else list(content)


def _slots(kind: type) -> list[str]:
    """The attributes of a class that have places of their own."""
    found = []
    for one in kind.__mro__:
        names = vars(one).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _slot(value: Any, name: str) -> Any:
    return getattr(value, name, _MISSING) if name in _slots(type(value)) else _MISSING


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _MISSING


def _names(code: types.CodeType) -> set[str]:
    """Names that code, and the functions in it, may look up as variables of a module."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*inner)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject
