"""What functions read beside their arguments: global variables, closures, defaults; from their code, without a call."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib.util
import inspect
import operator
import os
import re
import site
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn

from ..compat.torch import pytree
from ..core import code_origin

STDLIB = code_origin.STDLIB, str(Path(dis.__file__).parent)
_GETTERS = (operator.attrgetter, operator.methodcaller)
CALLED = (types.FunctionType, types.MethodType, functools.partial, *_GETTERS)
# What looks up all names, or those that it is given elsewhere; by any name in a variable, and by these as an attribute.
_LOOKUPS = {
    "getmembers": inspect.getmembers,
    "getmembers_static": inspect.getmembers_static,
    "getattr_static": inspect.getattr_static,
    "get_annotations": inspect.get_annotations,
    "get_type_hints": typing.get_type_hints,
    "attrgetter": operator.attrgetter,
    "__getattribute__": object.__getattribute__,
}
_ALL_NAMES = ("vars", "dir", "inspect", *_LOOKUPS)
_LOOK_UP = (vars, dir, getattr, hasattr, inspect, type.__getattribute__, *_LOOKUPS.values())
# What reads attributes past the methods of an object's class, by which other reads are recorded.
_UNSEEN_READS = frozenset({"__getattribute__", "__get__", "getattr_static", "getmembers_static"})
METHODS_OF_C = (types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType)
_FORMATS = ("format", "format_map")  # "{0.name}".format(x) reads an attribute
_NAME = re.compile(r"[^\W\d]\w*")
_KINDS = (types.BuiltinFunctionType, *METHODS_OF_C, types.ModuleType, type)
_CONSTANTS = (bool, type(None), type(...), type(NotImplemented))
_READ_ALL = ("globals", "eval", "exec")  # may read any variable of the function's module
_PACKAGES = tuple({*site.getsitepackages(), site.getusersitepackages(), *STDLIB})
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # also those of another environment that is on the path
_LIBRARIES = (*_PACKAGES, code_origin.TORCH, code_origin.PACKAGE, "<frozen")
_MAX_DEPTH = 4  # levels of containers and objects in which trained parts of a loss function are looked for


@dataclass(frozen=True)
class Variable:
    """A variable that a function reads: a global one (``space`` is the module's namespace), or that of a closure."""

    label: str
    name: str
    space: dict[str, Any] | types.CellType

    @property
    def value(self) -> Any:
        """Raises: KeyError or ValueError if it is not set."""
        return self.space[self.name] if isinstance(self.space, dict) else self.space.cell_contents


@dataclass(frozen=True)
class Unset:
    """A global variable that a function names and that is not there: Python looks on among its own, if anywhere."""

    name: str
    space: dict[str, Any]


@dataclass
class Walk:
    """Follows functions to the functions that they call by name.

    ``variables``: what all of them read, ``unset``: what they name in vain; ``functions``: themselves. ``names``: what
    they look up in objects, modules and classes, or might, as they have text that is a name. ``computes_names``:
    whether they also look up names that are computed, as in ``getattr(config, key)``; ``reads_unseen``: whether they
    read attributes as ``object.__getattribute__(config, "key")`` does, which no method of the object's class sees.
    Functions of installed packages are not followed: their variables are constants.
    """

    variables: list[Variable] = field(default_factory=list)
    unset: list[Unset] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    computes_names: bool = False
    _modules: list[tuple[str, str]] = field(default_factory=list)  # names, and the packages that they are relative to
    _followed: set[int] = field(default_factory=set)
    _seen: set[tuple[int, str]] = field(default_factory=set)

    @property
    def reads_unseen(self) -> bool:
        """True if attributes are read past the methods of an object's class."""
        return not self.names.isdisjoint(_UNSEEN_READS)

    def follow(self, value: Any, owner: type | None = None) -> None:
        """Follow a function, a bound method, a partial, or a module's ``forward``."""
        self._note_lookup(value)
        if isinstance(value, functools.partial):
            for argument in (value.func, *value.args, *value.keywords.values()):
                self.follow(argument)
        elif isinstance(value, types.MethodType):
            self.follow(value.__func__, type(value.__self__))
        elif isinstance(value, nn.Module):
            for part in value.modules():
                self.follow(getattr(type(part), "forward", None), type(part))
        elif isinstance(value, types.FunctionType):
            self.follow(getattr(value, "__wrapped__", None), owner)
            self._function(value, owner)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, _GETTERS):
            paths = [path for path in pytree.tree_leaves(value.__reduce__()) if isinstance(path, str)]
            self.names.update(name for path in paths for name in path.split("."))
        elif isinstance(call := getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004
            self._function(call, type(value))

    def _module(self, module: types.ModuleType) -> None:
        """Follow what a user's module computes its attributes by: its ``__getattr__``, and methods of its class.

        The modules that it has imported are followed, too.
        """
        if id(module) in self._followed or is_library_module(module):
            return
        self._followed.add(id(module))
        self.follow(vars(module).get("__getattr__"))
        for member in vars(type(module)).values():
            self.follow(member.fget if isinstance(member, property) else member, type(module))
        for part in list(vars(module).values()):
            if isinstance(part, types.ModuleType):
                self._module(part)

    def _note_lookup(self, value: Any) -> None:
        """Note a function that looks attributes up by a name that it is given, or past the methods of a class."""
        formats = isinstance(getattr(value, "__self__", None), str) and getattr(value, "__name__", "") in _FORMATS
        self.computes_names |= formats or any(value is lookup for lookup in _LOOK_UP)
        if getattr(value, "__name__", "") in _UNSEEN_READS and isinstance(value, (types.FunctionType, *METHODS_OF_C)):
            self.names.add(value.__name__)

    def _function(self, function: types.FunctionType, owner: type | None) -> None:
        code = function.__code__
        if id(function) in self._followed or is_library(code):
            return
        self._followed.add(id(function))
        self.functions.append(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._variable(Variable(name, name, cell))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.follow(default)
        self.computes_names |= computes_names(code)
        self._names_in(function, owner)

    def _names_in(self, function: types.FunctionType, owner: type | None) -> None:
        """Take what the code of ``function``, a method of ``owner`` if it is one, names."""
        names = list(_names(function.__code__))
        if any(kind == "global" and name in _READ_ALL for name, kind in names):
            for name in list(function.__globals__):
                self._global(name, function.__globals__)
            everything = {"globals()": types.MappingProxyType(function.__globals__)}  # others may come to it
            if id(function.__globals__) not in self._followed:
                self._followed.add(id(function.__globals__))
                self._variable(Variable("globals()", "globals()", everything))
        for name, kind in names:
            if kind == "global":
                self._global(name, function.__globals__)
                continue
            if kind == "module":
                self._modules.append((name, str(function.__globals__.get("__package__") or "")))
                continue
            self.names.add(name)
            method = getattr(owner, name, None) if kind == "attribute" else None
            self.follow(method if isinstance(method, types.FunctionType) else None, owner)

    def take_modules(self) -> None:
        """Take the modules that functions import, or may name in text, for read, as far as they are there by now."""
        for name, package in self._modules:
            path = name
            with contextlib.suppress(ImportError):  # no such package: the import fails, too
                path = importlib.util.resolve_name(name, package)
            if path in sys.modules and not is_library_module(sys.modules[path]):
                self._variable(Variable(path, path, sys.modules))

    def _global(self, name: str, space: dict[str, Any]) -> None:
        if name in space:
            self._variable(Variable(name, name, space))
        elif (id(space), name) not in self._seen:
            self._seen.add((id(space), name))
            self.unset.append(Unset(name, space))
            if name in vars(builtins) and not _is_of_builtins(vars(builtins)[name]):
                self._variable(Variable(name, name, vars(builtins)))

    def _variable(self, variable: Variable) -> None:
        key = id(variable.space), variable.name
        if key in self._seen:
            return
        self._seen.add(key)
        try:
            value = variable.value
        except (KeyError, ValueError):  # not set yet
            return
        self.variables.append(variable)
        if isinstance(value, (*CALLED, *_KINDS)):
            self.follow(value)


def _is_of_builtins(value: Any) -> bool:
    """Return whether a variable of ``builtins`` is one of Python's: a function, a class or a constant."""
    module = value.__module__ if hasattr(value, "__module__") else type(value).__module__
    return module in ("io", "_sitebuiltins") or isinstance(value, (types.BuiltinFunctionType, type, *_CONSTANTS))


def computes_names(code: types.CodeType) -> bool:
    """Return whether code, or a function inside it, looks up an attribute by a name that is not text in it, as far as
    it can be told from the code: with ``getattr``, ``hasattr``, ``vars``, ``dir``, ``__dict__``, functions of
    ``inspect`` and the like, or ``format`` of text that is no constant."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG", "RESUME")]
    if any(_computes_name(steps, index) for index in range(len(steps))):
        return True
    return any(computes_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _computes_name(steps: Sequence[dis.Instruction], index: int) -> bool:
    """Return whether one step of code begins such a look-up."""
    step, name = steps[index], steps[index].argval
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and (name == "__dict__" or name in _LOOKUPS):
        return True
    if name in _FORMATS and step.opname.startswith("LOAD_") and steps[index - 1].opname != "LOAD_CONST":
        return True
    if step.opname in ("IMPORT_NAME", "IMPORT_FROM") and name in _ALL_NAMES:
        return True
    if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
        return False
    return name in _ALL_NAMES or (name in ("getattr", "hasattr") and not _is_given_text(steps[index + 1 :]))


def _is_given_text(steps: Sequence[dis.Instruction]) -> bool:
    """Return whether the call of ``getattr`` that follows takes text as it stands in the code for its second argument:
    what puts it on the stack is a constant, and what comes after lies above it."""
    depth, name_depth = 0, 2
    is_text, last_op = False, ""
    for step in steps:
        calls = step.opname == "PRECALL" or (step.opname == "CALL" and last_op != "PRECALL")
        if calls and depth == step.arg:
            return is_text
        if "JUMP" in step.opname:
            return False
        last_op = step.opname
        if depth == 0 and step.opname == "PUSH_NULL":
            continue
        after = depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if depth < name_depth:
            is_text = after == name_depth and step.opname == "LOAD_CONST" and isinstance(step.argval, str)
        elif after <= name_depth:
            is_text = False
        depth = after
    return False


def functions_of(member: property | staticmethod[..., Any] | classmethod[Any, ..., Any]) -> list[Any]:
    """Return the functions that a member of a class calls."""
    return [member.fget] if isinstance(member, property) else [member.__func__]


def is_library(code: types.CodeType) -> bool:
    """Return whether code belongs to an installed package, to torch, to this package or to Python itself."""
    return _is_library_file(code.co_filename)


def reads_for_user(frame: types.FrameType | None) -> bool:
    """Return whether neither torch nor this package runs in ``frame``, or called what runs there and belongs to Python
    itself, as ``copy.copy``: other packages read for the user, as ``model_dump`` of pydantic."""
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith((code_origin.TORCH, code_origin.PACKAGE))


def _is_of_python(file: str) -> bool:
    return file.startswith((*STDLIB, "<frozen")) and not any(
        f"{os.sep}{folder}{os.sep}" in file for folder in _PACKAGE_FOLDERS
    )


def is_library_module(module: types.ModuleType) -> bool:
    """Return whether a module belongs to an installed package, to torch, to this package or to Python itself, or is in
    the namespace of one that does, as ``torch.ops.aten``."""
    package = sys.modules.get(str(module.__name__).partition(".")[0], module)
    folders = getattr(package, "__path__", ())  # a package without an __init__.py has no file
    for file in (getattr(package, "__file__", None), getattr(module, "__file__", None), *folders):
        if isinstance(file, str):
            return _is_library_file(file)
    return package.__name__ in sys.builtin_module_names or getattr(package, "__spec__", None) is not None


def _is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{folder}{os.sep}" in file for folder in _PACKAGE_FOLDERS)


def _names(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yield (name, kind) of all that code, and functions inside it, looks up: ``"global"``, ``"attribute"``,
    ``"text"`` that could be a name, as in ``getattr(x, "name", 1)``, or ``"module"``, the path of one, with a dot in
    front for each level that it is relative to."""
    level = 0
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval), "global"
        elif step.opname in ("LOAD_METHOD", "LOAD_ATTR", "IMPORT_FROM"):
            yield str(step.argval), "attribute"
        elif step.opname == "IMPORT_NAME":
            yield "." * level + str(step.argval), "module"
        elif step.opname.startswith("LOAD_") and isinstance(step.argval, int):
            level = step.argval  # of an import, which loads the names that it takes next
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        else:
            yield from _names_in(constant)


def _names_in(constant: Any) -> Iterator[tuple[str, str]]:
    """Yield what text, also in tuples, may name: those of a match statement, or in ``"{0.name}".format(x)``."""
    if isinstance(constant, tuple):
        for inner in constant:
            yield from _names_in(inner)
    elif isinstance(constant, str):
        if constant in sys.modules:
            yield constant, "module"
        if constant.isidentifier():
            yield constant, "text"
        elif "{" in constant:
            yield from ((name, "text") for name in _NAME.findall(constant))


def trainable(call: Callable[..., Any] | None, model: nn.Module) -> dict[str, nn.Module | nn.Parameter]:
    """Return modules and parameters that a loss function uses and ``model`` does not have, by readable names.

    They are of its closure, global variables, arguments in a partial, defaults, or the object whose method it is.
    """
    trained = _TrainedParts({id(part) for part in (*model.modules(), *model.parameters())})
    trained.look_at("", call)
    walk = Walk()
    walk.follow(call)
    for variable in walk.variables:
        trained.look_at(variable.name, variable.value)
    if isinstance(call, types.FunctionType):
        defaults: dict[Any, Any] = dict(enumerate(call.__defaults__ or ()))
        for name, default in (defaults | (call.__kwdefaults__ or {})).items():
            trained.look_at(str(name), default)
    return trained.parts


@dataclass
class _TrainedParts:
    """Collects the modules and parameters of a loss function, by names of which no two are equal."""

    seen: set[int]  # ids of what the model has, and of what ``parts`` has
    parts: dict[str, nn.Module | nn.Parameter] = field(default_factory=dict)

    def look_at(self, name: str, value: Any, depth: int = 0) -> None:
        """Add ``value``, or what is found in it."""
        if isinstance(value, (nn.Module, nn.Parameter)):
            self._add(name, value)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.look_at(name, part, depth)
        elif isinstance(value, types.MethodType):
            self.look_at(name, value.__self__, depth)
        elif depth < _MAX_DEPTH:
            for label, content in _contents(name, value):
                self.look_at(label, content, depth + 1)

    def _add(self, name: str, part: nn.Module | nn.Parameter) -> None:
        if id(part) in self.seen:
            return
        names = chain((name,), (f"{name}_{number}" for number in count(2)))
        self.parts[next(label for label in names if label not in self.parts)] = part
        inner = (*part.modules(), *part.parameters()) if isinstance(part, nn.Module) else ()
        self.seen.update(map(id, (part, *inner)))


def _contents(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object of the user's holds, by name."""
    if isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield f"{name}_{key}" if name else str(key), item
    elif not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and not str(type(value).__module__).startswith(("torch", "builtins")):
            yield name, fields
