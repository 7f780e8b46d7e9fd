"""Which attributes a trace reads: recorded while it runs, so that their values can be compared before later steps."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .containers import fields_of, names_of
from .function_reads import is_library
from .python_state import CODE, OWN, AttributeSnapshot
from .reach import RECORDS, is_observable, reachable


@dataclass(frozen=True)
class Read:
    """An attribute that was read: where it lies now, and its name for people."""

    label: str
    owner: Any
    name: str


def _ignore(function: Any) -> None:
    """Do nothing with a function that was met."""


@dataclass
class Reads:
    """Records what is read of the objects that it was told of, and of those that it meets on the way.

    ``state``: every object that is met is remembered there as it was. ``on_function``: is called with each function
    that is met. After the trace: ``found``, the attributes that were read; ``missing``, those that were not there;
    ``whole``, the objects whose ``__dict__`` was read, of which all may have been read; ``modules``, those that were
    met first.
    """

    state: AttributeSnapshot
    on_function: Callable[[Any], None] = _ignore
    found: list[Read] = field(default_factory=list)
    missing: list[Read] = field(default_factory=list)
    whole: dict[int, Any] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    _labels: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _classes: dict[type, tuple[bool, Any]] = field(
        default_factory=dict
    )  # whether it had a method of its own, and which

    def meet(self, label: str, value: Any) -> None:
        """Record from now on what is read of ``value``, and of all that it holds, where reads can be observed."""
        for path, child in reachable([(label, value)], self.is_whole, {}):
            if isinstance(child, nn.Module):
                self._meet_module(path, child)
            elif isinstance(child, CODE) and not isinstance(child, (type, types.ModuleType)):
                self.on_function(child)
            elif is_observable(child) and id(child) not in self._labels:
                self._labels[id(child)] = path, child
                self.state.add(path, child)
                if not self._watch(type(child)):
                    self._take_whole(path, child)
                self.on_function(getattr(type(child), "__call__", None))  # noqa: B004

    def _meet_module(self, label: str, module: nn.Module) -> None:
        if id(module) in self._labels:
            return
        self.modules.append((label, module))
        for name, part in module.named_modules():
            if id(part) not in self._labels:
                path = ".".join(filter(None, (label, name)))
                self._labels[id(part)] = path, part
                self.state.add(path, part)
                self.on_function(getattr(type(part), "forward", None))

    def _take_whole(self, label: str, owner: Any) -> None:
        """Take all attributes of an object for read."""
        self.whole[id(owner)] = owner
        for name, value in zip(names_of(owner), fields_of(owner), strict=True):
            self.meet(f"{label}.{name}", value)

    def is_whole(self, value: Any) -> bool:
        """Return whether all attributes of an object may have been read."""
        return id(value) in self.whole

    @property
    def owners(self) -> list[tuple[str, Any]]:
        """The objects and modules whose reads were recorded, with their labels."""
        return list(self._labels.values())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record reads inside."""
        self._watch(nn.Module)
        try:
            yield
        finally:
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
            if key in seen or name in OWN or id(this) not in labels:
                return method(this, name)
            seen.add(key)
            try:
                value = method(this, name)
            except AttributeError:
                self._miss(this, name)
                raise
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

    def _miss(self, owner: Any, name: str) -> None:
        if name.startswith("__") or (isinstance(owner, nn.Module) and _is_part(owner, name)):
            return
        self.missing.append(Read(self._label(owner, name), owner, name))

    def _note(self, owner: Any, name: str, value: Any) -> None:
        if name == "__dict__":
            if not is_library(sys._getframe(2).f_code):
                self._take_whole(self._labels[id(owner)][0], owner)
            return
        if name.startswith("__"):
            return
        self.found.append(Read(self._label(owner, name), owner, name))
        self.meet(self._label(owner, name), value)


def _is_part(module: nn.Module, name: str) -> bool:
    """Return whether torch keeps this attribute of a module apart, as a parameter, buffer or module."""
    fields = object.__getattribute__(module, "__dict__")
    return any(name in fields[kind] for kind in ("_parameters", "_buffers", "_modules"))
