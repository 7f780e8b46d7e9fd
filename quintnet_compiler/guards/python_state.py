"""What a module keeps in Python: attributes, lists, generators of random numbers. Noticed where a trace changes it."""

from __future__ import annotations

import enum
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..compat.torch import RNN_WEIGHT_LISTS
from ..compat.torch_codegen import SHIPPED
from ..compat.torch_hooks import MODULE_HOOKS
from .namespaces import MISSING, Fields, Missing, SlotFields

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range)
PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial, types.ModuleType)
OWN = frozenset(vars(nn.Module())) - {"training"}  # what torch keeps in every module
PARTS = types.MappingProxyType({"_parameters": "the parameter", "_buffers": "the buffer", "_modules": "the module"})


def is_plain(value: Any) -> bool:
    """Return whether ``==`` compares such values fully: numbers, text, dtypes; lists, tuples, sets, dicts of them."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if isinstance(value, slice):
        return all(map(is_plain, _bounds(value)))
    return isinstance(value, PLAIN) or (type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0)


def _bounds(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


def is_value(value: Any) -> bool:
    """Return whether a value is plain data that has no attributes of its own, as members of an enumeration have."""
    if isinstance(value, slice):
        return all(map(is_value, _bounds(value)))
    return isinstance(value, PLAIN) and not hasattr(value, "__dict__")


def other_zero(now: Any, then: Any) -> bool:
    """Return whether one of two equal values is 0.0 and the other is -0.0."""
    return type(now) is float and not now and str(now) != str(then)


def is_simple(value: Any) -> bool:
    """Return whether ``==`` says all of two such values, in which nothing can be changed unseen: numbers, text, dtypes,
    and lists, tuples and sets of them, of exactly these types."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_simple, value))
    return is_value(value) or (isinstance(value, numpy.generic) and not isinstance(value, numpy.void))


def copied(value: Any) -> Any:
    """Return the value with copies of the lists, tuples, sets and dicts in it; other objects stay the same ones."""
    if type(value) in (list, tuple):
        inner = list(map(copied, value))
        return inner if type(value) is list else value if all(map(is_, inner, value)) else tuple(inner)
    if type(value) is set:
        return set(value)
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    return value


def same(now: Any, then: Any) -> bool:
    """Return whether a value is what was ``copied`` of it: equal plain data, the same objects otherwise."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(map(same, now, then))
    if isinstance(now, dict):
        return list(now) == list(then) and all(map(same, now.values(), then.values()))
    if isinstance(now, types.MethodType):
        return bool(now == then)
    if isinstance(now, (set, frozenset)) and set(map(id, now)) == set(map(id, then)):
        return True
    return is_plain(now) and (bool(now == then) or bool(now != now and then != then))


def short_text(value: Any) -> str:
    """Return a value as errors show it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if value is MISSING:
        return "nothing"
    if isinstance(value, (list, tuple, dict, set)) and not is_plain(value):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value) if is_plain(value) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


FORWARD = "the forward pass"


@dataclass(frozen=True)
class Change:
    """One thing that a trace changed. ``what`` names it for people, ``by`` whose code did it; ``changed`` asks again.

    ``put`` makes it what the trace made of it, where that is plain data: it may stay so from then on. ``undo`` makes it
    what it was. ``of_process``: it belongs to all threads of the process, any of which may have changed it.
    """

    what: str
    before: Any
    after: Any
    changed: Callable[[], bool]
    put: Callable[[], None] | None = None
    undo: Callable[[], None] | None = None
    by: str = FORWARD
    of_process: bool = False

    def __str__(self) -> str:
        if not isinstance(self.before, Missing) and short_text(self.before) == short_text(self.after):
            return self.what
        return f"{self.what} (from {short_text(self.before)} to {short_text(self.after)})"


@dataclass(frozen=True)
class _Namespace:
    """A namespace as it was. ``names``: of what is looked at; None for all of it. ``copies``: with copied lists."""

    kind: str
    label: str
    own: MutableMapping[str, Any]
    held: dict[str, Any]
    copies: dict[str, Any]
    names: frozenset[str] | None
    by: str

    @classmethod
    def of(
        cls, kind: str, label: str, own: MutableMapping[str, Any], names: Iterable[str] | None, by: str
    ) -> _Namespace:
        chosen = None if names is None else frozenset(names)
        held = dict(own) if chosen is None else {name: own[name] for name in chosen if name in own}
        return cls(kind, label, own, held, {n: copied(x) for n, x in held.items() if n not in OWN}, chosen, by)

    def changes(self) -> list[Change]:
        now = self.own.keys() - OWN if self.names is None else self.names
        names = [name for name in (self.copies.keys() | now) - RNN_WEIGHT_LISTS if self._differs(name)]
        return [self._change(name) for name in sorted(names)]

    def _differs(self, name: str) -> bool:
        return not same(self.own.get(name, MISSING), self.copies.get(name, MISSING))

    def _change(self, name: str) -> Change:
        path = f"{self.label}.{name}".removeprefix(".")
        then, now = self.copies.get(name, MISSING), self.own.get(name, MISSING)
        plain = is_plain(now) and (then is MISSING or is_plain(then))
        put = functools.partial(self.own.__setitem__, name, copied(now)) if plain else None
        undo = functools.partial(self.own.pop, name, None)
        if then is not MISSING:
            undo = functools.partial(self.own.__setitem__, name, self.held[name])
        return Change(f"{self.kind} {path!r}", then, now, lambda: self._differs(name), put, undo, self.by)

    def write(self) -> Iterator[str]:
        """Write tensors that stand in the place of others to those, where they fit; yields their names."""
        for name, old in self.held.items():
            new = self.own.get(name)
            if not isinstance(old, Tensor) or not isinstance(new, Tensor) or new is old:
                continue
            if (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
                old.copy_(new)
                self.own[name] = old
                yield f"{self.label}.{name}".removeprefix(".")

    def restore(self) -> None:
        if self.names is None:
            for name in [name for name in self.own if name not in self.held]:
                del self.own[name]
        for name, value in self.held.items():
            if self.own.get(name, MISSING) is not value:
                self.own[name] = value
            if name in self.copies and not same(value, self.copies[name]):
                _refill(value, self.copies[name])


@dataclass(frozen=True)
class _KeptHooks:
    """The hooks of one kind that a module had. Those that forward registers when it is called first may stay."""

    label: str
    own: dict[int, Any]
    then: dict[int, Any]
    by: str

    def changed(self) -> bool:
        return list(self.own.items()) != list(self.then.items())

    def change(self) -> Change:
        put, undo = (
            functools.partial(_refill, self.own, dict(self.own)),
            functools.partial(_refill, self.own, self.then),
        )
        return Change(f"the hooks of {self.label!r}", self.then, dict(self.own), self.changed, put, undo, self.by)


@dataclass
class AttributeSnapshot:
    """The attributes of objects as they were: what has changed since, and all of it put back.

    Of a module, its parameters, buffers and parts count too: which tensors they are, not their values; and its hooks.
    ``by``: whose code changes what is added now.
    """

    by: str = FORWARD
    kept: list[_Namespace] = field(default_factory=list)
    hooks: list[_KeptHooks] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def add(self, label: str, owner: Any) -> None:
        """Remember the attributes of ``owner``, a module or another object."""
        if id(owner) in self.seen:
            return
        self.seen.add(id(owner))
        if slots := SlotFields(owner):
            self.kept.append(_Namespace.of("the attribute", label, slots, None, self.by))
        if not hasattr(owner, "__dict__"):
            return
        own = vars(owner)
        if isinstance(owner, nn.Module):
            self.kept += [_Namespace.of(kind, label, own[part], None, self.by) for part, kind in PARTS.items()]
            self.hooks += [_KeptHooks(label, own[name], dict(own[name]), self.by) for name in MODULE_HOOKS]
        self.kept.append(_Namespace.of("the attribute", label, own, None, self.by))

    def add_names(self, own: MutableMapping[str, Any], names: Iterable[str]) -> None:
        """Remember some variables of a namespace."""
        self.kept.append(_Namespace.of("the variable", "", own, names, self.by))

    def add_space(self, owner: type | types.ModuleType) -> None:
        """Remember the attributes of a class, or the variables of a Python module.

        Forward names the class of a derivative, whose own code changes it.
        """
        if id(owner) not in self.seen:
            self.seen.add(id(owner))
            self.kept.append(_Namespace.of("the attribute", owner.__name__, Fields(owner), None, self.by))
        elif self.by != FORWARD:
            self.kept = [replace(x, by=self.by) if _is_of(x.own, owner) else x for x in self.kept]

    def changes(self) -> list[Change]:
        changes = [change for kept in self.kept for change in kept.changes()]
        return changes + [kept.change() for kept in self.hooks if kept.changed()]

    def write_buffers(self) -> list[str]:
        """Write what was assigned in place of a buffer to the buffer itself, where it fits; returns the names of such
        buffers."""
        return [name for kept in self.kept if kept.kind == PARTS["_buffers"] for name in kept.write()]

    def restore(self) -> None:
        """Every attribute is the object that it was, and lists, sets and dicts have the elements that they had."""
        for kept in self.kept:
            kept.restore()
        for hooks in self.hooks:
            if hooks.changed():
                _refill(hooks.own, hooks.then)


def _is_of(space: object, owner: object) -> bool:
    return isinstance(space, Fields) and space.owner is owner


def _refill(value: Any, then: Any) -> None:
    if isinstance(value, list):
        value[:] = then
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(then)


@dataclass(frozen=True)
class Generators:
    """Python's and NumPy's generators of random numbers, as they were."""

    states: tuple[tuple[str, Callable[[], Any], Callable[[Any], None], Any], ...]

    @classmethod
    def now(cls) -> Generators:
        state = numpy.random.get_state(legacy=False)
        python = "Python's random", random.getstate, random.setstate, random.getstate()
        of_numpy = "numpy.random", lambda: numpy.random.get_state(legacy=False), numpy.random.set_state, state
        return cls((python, of_numpy))

    def changes(self) -> list[Change]:
        changes = []
        for name, get, _, then in self.states:
            text = str(then)

            def changed(get: Callable[[], Any] = get, text: str = text) -> bool:
                return str(get()) != text

            if changed():
                changes.append(Change(f"the state of {name}", None, None, changed, of_process=True))
        return changes

    def restore(self) -> None:
        for _, get, put, then in self.states:
            if str(get()) != str(then):
                put(then)


def same_values(now: Tensor, then: Tensor) -> bool:
    """Return whether two tensors have one shape and equal values; NaN is what it was."""
    if SHIPPED.equal(now, then):
        return True
    return now.shape == then.shape and bool(((now == then) | (now.isnan() & then.isnan())).all())
