"""Which attributes a trace reads: recorded while it runs, so that their values can be compared before later steps."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, default_generator, nn

from .by_name import constructors, is_users, special_methods
from .compiled_state import IterationState, is_compiled, is_iterator, is_pointer
from .containers import fields_of, names_of, reading_of
from .function_reads import CALLED, METHODS_OF_C, functions_of, is_library_module, reads_for_user
from .namespaces import space_of
from .python_state import CODE, OWN, AttributeSnapshot, Change
from .reach import RECORDS, is_observable, reachable

_OF_ALL = ("__dict__", "__reduce_ex__", "__reduce__", "__getstate__")  # all attributes, as for copy.copy


@dataclass(frozen=True)
class Read:
    """An attribute that was read: where it lies now, and its name for people."""

    label: str
    owner: Any
    name: str


@dataclass(frozen=True)
class TensorPlace:
    """Name the place of a parameter or a buffer in a module: its path, a namespace and the name there."""

    path: str
    space: Mapping[str, Any]
    name: str


def _ignore(function: Any) -> None:
    """Do nothing with a function that was met."""


def _nothing() -> None:
    """Do nothing after something was met."""


@dataclass
class Reads:
    """Records what is read of the objects that it was told of, and of those that it meets on the way.

    ``state``: every object that is met is remembered there as it was. ``on_function``: is called with each function
    that is met; ``on_read``: after a read, when what it gave was met. After the trace: ``found``, the attributes that
    were read; ``missing``, those that were not there; ``whole``, the objects whose ``__dict__`` was read, of which all
    may have been read; ``modules``, those that were met first; ``spaces``, the classes and Python modules that were
    met, and the classes of all objects; ``of_tensors``, by path, parameters and buffers that were asked for attributes;
    ``positions``, of iterators and of generators of random numbers, by ``id``; ``pointers`` of ctypes, by label.
    """

    state: AttributeSnapshot
    on_function: Callable[[Any], None] = _ignore
    on_read: Callable[[], None] = _nothing
    found: list[Read] = field(default_factory=list)
    missing: list[Read] = field(default_factory=list)
    whole: dict[int, Any] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    spaces: dict[int, tuple[str, Any]] = field(default_factory=dict)
    of_tensors: dict[str, tuple[TensorPlace, Tensor]] = field(default_factory=dict)
    positions: dict[int, IterationState] = field(default_factory=dict)
    pointers: dict[str, Any] = field(default_factory=dict)
    _all_whole: bool = False  # whether attributes may be read unseen
    _records: bool = True  # False while this class itself reads
    _modules: list[types.ModuleType] = field(default_factory=list)  # whose reads are recorded
    _labels: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _classes: dict[type, tuple[bool, Any]] = field(default_factory=dict)  # whether it had its own method, and which

    @property
    def objects(self) -> list[tuple[str, Any]]:
        """All objects that were met, with labels: their classes say what their special methods do."""
        return list(self._labels.values())

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing of what is read inside."""
        was_recording, self._records = self._records, False
        try:
            yield
        finally:
            self._records = was_recording

    def moved_positions(self) -> list[Change]:
        """Return the iterators, and generators of random numbers, that have given values since they were met."""
        return [kept.change() for kept in self.positions.values() if kept.has_moved()]

    def restore_positions(self) -> None:
        """Put these back to where they were."""
        for kept in self.positions.values():
            kept.restore()

    def meet(self, label: str, value: Any) -> None:
        """Record from now on what is read of ``value``, and of all that it holds, where reads can be observed."""
        with self.unrecorded():
            self._meet(label, value)

    def _meet(self, label: str, value: Any) -> None:
        for path, child in reachable([(label, value)], self.is_whole, {}):
            if id(child) not in self.positions and _has_position(child):
                self.positions[id(child)] = IterationState.of(path, child)
            if isinstance(child, nn.Module):
                self._meet_module(path, child)
            elif is_pointer(child):
                self.pointers[path] = child
            elif isinstance(child, (type, types.ModuleType)):
                self._meet_space(path, child)
                self._meet_functions(constructors(child) if isinstance(child, type) else ())
            elif isinstance(child, (*CODE, *CALLED, *METHODS_OF_C)):
                self.on_function(child)
            elif isinstance(child, (property, staticmethod, classmethod)):
                self._meet_functions(functions_of(child))
            elif is_observable(child) and id(child) not in self._labels:
                self._labels[id(child)] = path, child
                self.state.add(path, child)
                self._meet_space(type(child).__name__, type(child))
                if not self._watch(type(child)) or self._all_whole:
                    self._take_whole(path, child)
            else:
                self._meet_space(type(child).__name__, type(child))

    def _meet_functions(self, functions: Iterable[Any]) -> None:
        for function in functions:
            self.on_function(function)

    def _meet_space(self, label: str, space: type | types.ModuleType) -> None:
        if id(space) in self.spaces:
            return
        self.spaces[id(space)] = label, space
        if isinstance(space, type):
            self._meet_class(space)
        elif not is_library_module(space):
            self._meet_python_module(label, space)

    def _meet_class(self, kind: type) -> None:
        for base in filter(is_users, kind.__mro__):
            self.state.add_space(base)
        if is_users(kind):
            self._meet_space(type(kind).__name__, type(kind))
            self._meet_functions(special_methods(kind))

    def _meet_python_module(self, label: str, module: types.ModuleType) -> None:
        self.state.add_space(module)
        if type(module) is types.ModuleType:
            self._labels[id(module)] = label, module
            module.__class__ = _RecordedModule
            self._modules.append(module)
            self._watch(_RecordedModule)
            if self._all_whole:
                self._take_whole(label, module)

    def _meet_module(self, label: str, module: nn.Module) -> None:
        if id(module) in self._labels or isinstance(module, torch.jit.ScriptModule):  # a call of that is refused
            return
        self.modules.append((label, module))
        for name, part in module.named_modules():
            if id(part) not in self._labels:
                path = ".".join(filter(None, (label, name)))
                self._labels[id(part)] = path, part
                self.state.add(path, part)
                self._meet_space(type(part).__name__, type(part))
                self.on_function(getattr(type(part), "forward", None))
                if self._all_whole:
                    self._take_whole(path, part)

    def take_all_whole(self) -> None:
        """Take all attributes of all objects for read, also of those that are met later: reads may be unseen."""
        if not self._all_whole:
            self._all_whole = True
            with self.unrecorded():
                for label, owner in list(self._labels.values()):
                    self._take_whole(label, owner)

    def _take_whole(self, label: str, owner: Any) -> None:
        """Take all attributes of an object for read."""
        if id(owner) in self.whole:
            return
        self.whole[id(owner)] = owner
        for name, value in zip(names_of(owner), fields_of(owner), strict=True):
            self.meet(f"{label}.{name}", value)

    def is_whole(self, value: Any) -> bool:
        """Return whether all attributes of an object may have been read."""
        return id(value) in self.whole

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record reads inside."""
        self._watch(nn.Module)
        try:
            yield
        finally:
            for space in self._modules:
                space.__class__ = types.ModuleType
            self._modules.clear()
            for kind, (own, method) in self._classes.items():
                if own:
                    kind.__getattribute__ = method  # type: ignore[method-assign]
                else:
                    del kind.__getattribute__
            self._classes.clear()

    def _watch(self, kind: type) -> bool:
        """Record reads of the instances of a class; return False if it does not let itself be changed."""
        if any(base in self._classes for base in kind.__mro__):
            return True
        method: Any = kind.__getattribute__
        seen, labels = self._seen, self._labels

        def read(this: Any, name: str) -> Any:
            key = (id(this), name)
            if key in seen or name in OWN or id(this) not in labels or not self._records:
                return method(this, name)
            if name not in _OF_ALL:  # this package reads them too
                seen.add(key)
            try:
                value = method(this, name)
            except AttributeError:
                self._miss(this, name)
                raise
            with self.unrecorded():
                self._note(this, name, value)
            return value

        setattr(read, RECORDS, True)
        own = "__getattribute__" in vars(kind)
        try:
            kind.__getattribute__ = read  # type: ignore[assignment,method-assign]
        except (AttributeError, TypeError):
            return False
        self._classes[kind] = own, method
        return True

    def _label(self, owner: Any, name: str) -> str:
        return f"{self._labels[id(owner)][0]}.{name}".removeprefix(".")

    def note_of_tensor(self, place: TensorPlace, tensor: Tensor, name: str, value: Any) -> None:
        """Record an attribute that somebody gave to a parameter or buffer."""
        self.of_tensors[place.path] = place, tensor
        self.found.append(Read(f"{place.path}.{name}", tensor, name))
        self.meet(f"{place.path}.{name}", value)

    def miss_of_tensor(self, place: TensorPlace, tensor: Tensor, name: str) -> None:
        """Record that a parameter or buffer does not have an attribute that was asked for."""
        self.of_tensors[place.path] = place, tensor
        self.missing.append(Read(f"{place.path}.{name}", tensor, name))

    def _miss(self, owner: Any, name: str) -> None:
        if name.startswith("__") or (isinstance(owner, nn.Module) and _is_part(owner, name)):
            return
        self.missing.append(Read(self._label(owner, name), owner, name))

    def _note(self, owner: Any, name: str, value: Any) -> None:
        if name in _OF_ALL:
            if reads_for_user(sys._getframe(2)):
                self._take_whole(self._labels[id(owner)][0], owner)
                self.on_read()
            return
        if name.startswith("__") and space_of(owner, name) is None:  # of the language
            return
        self.found.append(Read(self._label(owner, name), owner, name))
        self.meet(self._label(owner, name), value)
        self.on_read()


def _has_position(value: Any) -> bool:
    """Return whether something may be taken of a value that is no container."""
    if isinstance(value, Generator):
        return value is not default_generator  # of which other threads may draw
    return is_iterator(value) or (reading_of(value) is None and is_compiled(value))


class _RecordedModule(types.ModuleType):
    """Is the class of Python modules while reads of their variables are recorded."""


def _is_part(module: nn.Module, name: str) -> bool:
    """Return whether torch keeps this attribute of a module apart, as a parameter, buffer or module."""
    fields = object.__getattribute__(module, "__dict__")
    return any(name in fields[kind] for kind in ("_parameters", "_buffers", "_modules"))
