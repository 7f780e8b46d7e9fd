"""Modules and classes that functions read by name, as in ``config.SCALE``: which of their variables those may be."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from .function_reads import is_library, is_library_module
from .python_state import CODE, is_value

_LIBRARY_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code may have made
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# what Python looks up in the class of an object that is there, and not in the object
_SPECIAL = frozenset(
    name
    for kind in (int, float, complex, str, list, dict, set, types.FunctionType, type(iter(())))
    for name in dir(kind)
    if name.startswith("__") and callable(getattr(kind, name, None)) and name not in _CONSTRUCTORS
) | {
    *("__getattr__", "__delattr__", "__missing__", "__enter__", "__exit__", "__bool__", "__index__", "__fspath__"),
    *("__matmul__", "__rmatmul__", "__imatmul__", "__itruediv__", "__torch_function__", "__array__"),
}

_OF_FUNCTIONS = _SPECIAL | {"forward", "backward", "setup_context", "jvp", "vmap"}


@dataclass(frozen=True)
class NamedSpace:
    """The variables of a module or a class. ``present``: the names among them that functions look up; ``absent``: those
    that functions look up and that it does not have, of which it may have one later."""

    label: str
    space: Mapping[str, Any]
    present: tuple[str, ...]
    absent: frozenset[str]

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of what is looked up, with labels."""
        return ((self.label_of(name), self.space[name]) for name in self.present)

    def label_of(self, name: str) -> str:
        """Return the name of a variable for people."""
        return f"{self.label}.{name}"


# what functions of Python look up, as dataclasses.fields and the iterator of an enumeration do
_BY_LIBRARY = frozenset({"__dataclass_fields__", "_member_map_"})


def spaces_by_name(roots: Iterable[tuple[str, Any]], names: Set[str]) -> list[NamedSpace]:
    """Return the modules and classes among ``roots``, and those in them, by the names that functions look up.

    Of modules that belong to installed packages, functions, modules and plain data count alone, and of their classes
    plain data.
    """
    pending, seen, spaces = list(roots), set[int](), list[NamedSpace]()
    while pending:
        label, value = pending.pop()
        if id(value) in seen or not isinstance(value, (type, types.ModuleType)):
            continue
        seen.add(id(value))
        new = _of_module(label, value, names) if isinstance(value, types.ModuleType) else _of_class(value, names)
        spaces += new
        pending += [row for space in new for row in space.values()]
    return spaces


def _of_module(label: str, module: types.ModuleType, names: Set[str]) -> list[NamedSpace]:
    space = vars(module)
    present = sorted(names & space.keys())
    if not is_library_module(module) or module is builtins:
        return [NamedSpace(label, space, tuple(present), frozenset(names - space.keys()))]
    code = tuple(name for name in present if isinstance(space[name], _LIBRARY_CODE) or is_value(space[name]))
    return [NamedSpace(label, space, code, frozenset())] if code else []


def is_users(kind: type) -> bool:
    """Return whether a class was not made by an installed package, by torch or by Python itself."""
    name = str(kind.__module__)  # a class in C may have something else
    module = sys.modules.get(name) or sys.modules.get(name.partition(".")[0])
    if module is None:  # of a file that was run without being imported
        return bool(kind.__flags__ & _HEAP)
    return name == "__main__" or not is_library_module(module)


def special_methods(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class that Python calls without reading an attribute of an object, as ``__getitem__``."""
    return (method for name, method in _methods(kind) if name.startswith("__") and name not in _CONSTRUCTORS)


def constructors(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class that are called when an object is made."""
    return (method for name, method in _methods(kind) if name in _CONSTRUCTORS)


def _methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for base in filter(is_users, kind.__mro__):
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, staticmethod) else member  # __new__ is one
            if isinstance(function, types.FunctionType):
                yield name, function


def _of_class(kind: type, names: Set[str]) -> list[NamedSpace]:
    bases = [base for base in kind.__mro__ if is_users(base)]
    others = [base for base in kind.__mro__ if base.__flags__ & _HEAP and not is_users(base)]
    defined = {name for base in kind.__mro__ for name in vars(base)}
    absent, looked_up = frozenset(names - defined), names | _BY_LIBRARY
    return [
        NamedSpace(base.__name__, vars(base), tuple(sorted(looked_up & vars(base).keys())), absent) for base in bases
    ] + [_plain_data(base, names) for base in others]


def _plain_data(kind: type, names: Set[str]) -> NamedSpace:
    own = vars(kind)
    return NamedSpace(kind.__name__, own, tuple(sorted(x for x in names & own.keys() if is_value(own[x]))), frozenset())


def class_namespaces(spaces: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the namespaces of the users' classes among ``spaces``, and of the classes that they are derived from."""
    kinds = [space for _, space in spaces if isinstance(space, type)]
    bases = {id(base): base for kind in kinds for base in kind.__mro__ if is_users(base)}
    return [(base.__name__, vars(base)) for base in bases.values()]


def is_constant(value: Any) -> bool:
    """Return whether a variable's value is compared by itself: plain data, a function, a class."""
    return is_value(value) or isinstance(value, CODE)


def special_spaces(kinds: Iterable[type]) -> list[NamedSpace]:
    """Return the users' classes that define ``kinds``, and ``nn.Module``, by methods that are called without a read.

    Python and autograd call these without reading an attribute of an object.
    """
    bases = {id(base): base for kind in kinds for base in kind.__mro__ if is_users(base) or base is nn.Module}
    return [_of_names(base, _OF_FUNCTIONS if issubclass(base, Function) else _SPECIAL) for base in bases.values()]


def _of_names(kind: type, names: frozenset[str]) -> NamedSpace:
    own = vars(kind)
    return NamedSpace(kind.__name__, own, tuple(sorted(names & own.keys())), names - own.keys())


def _functions_of(module: types.ModuleType, names: Set[str]) -> NamedSpace:
    own = vars(module)
    present = sorted(name for name in names & own.keys() if isinstance(own[name], _LIBRARY_CODE))
    return NamedSpace(module.__name__, own, tuple(present), frozenset())


def torch_spaces(names: Set[str], parts: Iterable[nn.Module]) -> list[NamedSpace]:
    """Return torch's own functions and methods of tensors that somebody may have replaced.

    These have ``names``, or the ``forward`` of a module of torch's looks them up.
    """
    kinds = *map(type, parts), *(vars(nn)[name] for name in names & vars(nn).keys())  # forward may make the latter
    forwards = {forward for kind in kinds if isinstance(forward := getattr(kind, "forward", None), types.FunctionType)}
    codes = [forward.__code__ for forward in forwards if is_library(forward.__code__)]
    names = names | {name for code in codes for name in code.co_names}
    spaces = [_functions_of(module, names) for module in (torch, nn.functional)]
    return [*spaces, _of_names(torch.Tensor, frozenset((names | _SPECIAL) & set(dir(torch.Tensor))))]
