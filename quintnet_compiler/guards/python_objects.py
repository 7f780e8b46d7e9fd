"""What Python objects hold, wherever a module or a loss function reaches them: kept while a module is traced, or runs
beside its program, and put back."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .namespaces import MISSING, Cell, Fields, SlotFields
from .stand_ins import StandIn

_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, Tensor)
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "quintnet", "quintnet_compiler"}
_FOLLOWED = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, functools.partial, nn.Module)
_CONTAINERS = (dict, list, set, deque)


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
        """Yield what a value holds, by label. What can change is remembered."""
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
        fields = getattr(value, "__dict__", None)
        for space in (SlotFields(value), fields):
            if isinstance(space, (SlotFields, dict)):
                attributes = _KeptNames(label, space, dict(space), all_names=True)
                self.held.append(attributes)
                yield from ((attributes.path(name), x) for name, x in space.items() if not isinstance(x, _LEAVES))
        yield from self._classes(kind)

    def _classes(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Yield the functions of classes, and remember the data of these."""
        for base in kind.__mro__:
            if id(base) in self._seen or str(base.__module__).partition(".")[0] in _LIBRARIES:
                continue
            self._seen[id(base)] = base
            members = Fields(base)
            yield from ((base.__name__, x) for x in members.values() if isinstance(x, types.FunctionType))
            data = {name: x for name, x in members.items() if not hasattr(type(x), "__get__")}
            self.held.append(_KeptNames(base.__name__, members, data))
            yield from ((f"{base.__name__}.{name}", x) for name, x in data.items() if isinstance(x, _CONTAINERS))

    def _read_by(self, label: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield what a function keeps, and the variables that it reads."""
        for name, content in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            cell = Cell(name, content)
            self.held.append(_KeptNames("", cell, dict(cell), all_names=True))
            yield from cell.items()
        yield from ((label, x) for x in (function.__defaults__, function.__kwdefaults__, function.__dict__) if x)
        if function.__module__ is None or str(function.__module__).partition(".")[0] in _LIBRARIES:
            return
        if "site-packages" in function.__code__.co_filename:
            return
        space = function.__globals__
        read = {name: space[name] for name in _names(function.__code__) if name in space}
        if read:
            self.held.append(_KeptNames("", space, read))
        yield from read.items()


class _Contents:
    def restore(self) -> Iterator[str]:
        """Put back what is another object now, and yield its label."""
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
class _KeptNames(_Contents):
    """Names in a namespace: attributes of an object or a class, variables. ``all_names``: there are no others."""

    label: str
    space: MutableMapping[str, Any]
    own: dict[str, Any]
    all_names: bool = False

    def path(self, name: str) -> str:
        """Return the label of a name."""
        return f"{self.label}.{name}".strip(".")

    def restore(self) -> Iterator[str]:
        for name, then in self.own.items():
            if self.space.get(name, MISSING) is not then:
                yield self.path(name)
                self.space[name] = then
        new = [name for name in self.space if name not in self.own] if self.all_names else []
        for name in new:
            yield self.path(name)
            del self.space[name]


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
    """Return a plain copy of a container, whatever a subclass makes of ``copy``."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return set(value) if isinstance(value, set) else list(value)


def _flat(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return [*content, *content.values()]
    return sorted(content, key=id) if isinstance(content, set) else list(content)


def _names(code: types.CodeType) -> set[str]:
    """Return names that code, and the functions in it, may look up as variables of a module."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject
