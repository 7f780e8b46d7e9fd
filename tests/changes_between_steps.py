"""Python state that forward or a loss reads, in many kinds of holders, and what may happen to it between two steps."""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getmembers as members
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

lookup = getattr
config = types.ModuleType("config")  # as a module of the user's own
config.__file__ = __file__


@dataclass(frozen=True)
class Change:
    """A value, what a loss is multiplied by where it reads it, and the value after a change (itself, if in place)."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], Any]


class Box:
    def __init__(self, k: Any) -> None:
        self.k = k


def _in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(value: Any) -> Any:
        change(value)
        return value

    return changed


def _data(x: Tensor) -> None:
    x.data = x.data * 2


def _reorder(value: dict[str, float]) -> None:
    value["a"] = value.pop("a")


def _closure() -> Any:
    factor = [1.5]

    def scale(*_: Any) -> float:  # also as a method of a class
        return factor[0]

    scale.set = lambda k: factor.__setitem__(0, k)  # type: ignore[attr-defined]
    return scale


CHANGES = {
    "number": Change(lambda: 1.5, lambda v: v, lambda v: 2.5),
    "text": Change(lambda: "a", len, lambda v: "abc"),
    "none": Change(lambda: None, lambda v: 1.0 if v is None else v, lambda v: 2.5),
    "tensor replaced": Change(lambda: torch.tensor(1.5), lambda v: v, lambda v: torch.tensor(2.5)),
    "tensor in place": Change(lambda: torch.tensor(1.5), lambda v: v, _in_place(lambda v: v.mul_(2))),
    "tensor data": Change(lambda: torch.tensor(1.5), lambda v: v, _in_place(_data)),
    "list element": Change(lambda: [1.5], lambda v: v[0], _in_place(lambda v: v.__setitem__(0, 2.5))),
    "list grows": Change(lambda: [1.5, 1.0], sum, _in_place(lambda v: v.append(2.5))),
    "dict entry": Change(lambda: {"k": 1.5}, lambda v: v["k"], _in_place(lambda v: v.update(k=2.5))),
    "dict order": Change(lambda: {"a": 1.5, "b": 2.5}, lambda v: next(iter(v.values())), _in_place(_reorder)),
    "nested": Change(
        lambda: {"a": {"b": [1.5, torch.ones(1)]}},
        lambda v: v["a"]["b"][0],
        _in_place(lambda v: v["a"]["b"].__setitem__(0, 2.5)),
    ),
    "array of one number": Change(lambda: numpy.array(1.5), float, _in_place(lambda v: v.fill(2.5))),
    "object": Change(lambda: Box(1.5), lambda v: v.k, _in_place(lambda v: setattr(v, "k", 2.5))),
    "closure": Change(_closure, lambda v: v(), _in_place(lambda v: v.set(2.5))),
    "nothing": Change(lambda: [1.5], lambda v: v[0], lambda v: v),
}


@dataclass(frozen=True)
class Holder:
    """Something that holds a value: how it is made, read by forward, and given another value."""

    make: Callable[[Any], Any]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], None]


@dataclasses.dataclass
class Fields:
    k: Any


@dataclasses.dataclass(slots=True)
class SlotFields:
    k: Any


class OwnSlots:
    __slots__ = ("k",)

    def __init__(self, k: Any) -> None:
        self.k = k


class SlotsAndMore(OwnSlots):
    def __init__(self, k: Any) -> None:
        super().__init__(k)
        self.other = 1


class AttrDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


class Proxy:
    def __init__(self, k: Any) -> None:
        self.__dict__["held"] = {"k": k}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["held"][name]


class OwnReads:
    def __init__(self, k: Any) -> None:
        self.k = k

    def __getattribute__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "__dict__")
        return fields[name] if name in fields else object.__getattribute__(self, name)


class ByProperty:
    def __init__(self, k: Any) -> None:
        self._held = {"k": k}

    @property
    def k(self) -> Any:
        return self._held["k"]


class Method:
    def __init__(self, k: Any) -> None:
        self.k = k

    def get(self) -> Any:
        return self.k

    def __call__(self) -> Any:
        return self.k


class OfClass:
    k: Any = None


class Base:
    k: Any = None


class Derived(Base):
    pass


class Named(NamedTuple):
    inner: list[Any]


class MyList(list):  # type: ignore[type-arg]
    pass


class Part(nn.Module):
    def __init__(self, k: Any) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        object.__setattr__(self, "k", k)


HELD: dict[str, Any] = {}
VARIABLE: Any = None
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("held")


def _set_global(_: Any, value: Any) -> None:
    global VARIABLE
    VARIABLE = value


def _by_global(value: Any) -> None:
    _set_global(None, value)


def _function(k: Any) -> Any:
    def read() -> Any:
        return read.k  # type: ignore[attr-defined]

    read.k = k  # type: ignore[attr-defined]
    return read


def _default(k: Any) -> Any:
    def read(held: list[Any] = [k]) -> Any:  # noqa: B006
        return held[0]

    return read


def _keyword_default(k: Any) -> Any:
    def read(*, k: Any = k) -> Any:
        return k

    return read


def _nonlocal(k: Any) -> Any:
    def read() -> Any:
        return k

    def put(value: Any) -> None:
        nonlocal k
        k = value

    read.put = put  # type: ignore[attr-defined]
    return read


def _identity(k: Any) -> Any:
    return k


def _class_value(kind: type, value: Any, of: type | None = None) -> Any:
    kind.k = value  # type: ignore[attr-defined]
    return (of or kind)()


BOX = Box(None)
NAMES = ["a"]
K_OF = operator.attrgetter("k")


class Described:
    def __get__(self, owner: Any, kind: type) -> Any:
        return BOX.k


class ByBox:
    """Reads an object that is a global variable, in many ways."""

    described = Described()

    def get(self) -> Any:
        return BOX.k

    @property
    def k(self) -> Any:
        return BOX.k

    def __getitem__(self, name: str) -> Any:
        return BOX.k

    @classmethod
    def inner(cls) -> ByBox:
        return cls()


def _by_box(value: Any) -> ByBox:
    BOX.k = value
    return ByBox()


def _set_box(_: Any, value: Any) -> None:
    BOX.k = value


class Meta(type):
    k: Any = None


class WithMeta(metaclass=Meta):
    pass


def _derived(k: Any) -> Derived:
    Base.k = k
    with contextlib.suppress(AttributeError):  # what a run before left
        del Derived.k
    return Derived()


def _optimizer(k: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    optimizer.param_groups[0]["held"] = k
    return optimizer


def _context(k: Any) -> contextvars.ContextVar[Any]:
    CONTEXT.set(k)
    return CONTEXT


def _defaulted(k: Any) -> contextvars.ContextVar[Box]:
    box = Box(k)
    return contextvars.ContextVar("defaulted", default=box)


def _missing(k: Any) -> Box:
    box = Box(0)
    box.__dict__.pop("k")
    return box


def _attribute(h: Any) -> Any:
    return h.k


def _item(h: Any) -> Any:
    return h["k"]


def _put_attribute(h: Any, value: Any) -> None:
    h.k = value


def _put_item(h: Any, value: Any) -> None:
    h["k"] = value


def _put_own(h: Any, value: Any) -> None:
    object.__setattr__(h, "k", value)


def _first(h: Any) -> Any:
    return h[0]


def _put_first(h: Any, value: Any) -> None:
    h[0] = value


TARGETS: list[Any] = []  # of weak references


def _weak(k: Any) -> Any:
    TARGETS.append(Box(k))
    return weakref.ref(TARGETS[-1])


HOLDERS = {
    "object": Holder(Box, _attribute, _put_attribute),
    "dataclass": Holder(Fields, _attribute, _put_attribute),
    "dataclass with slots": Holder(SlotFields, _attribute, _put_attribute),
    "slots": Holder(OwnSlots, _attribute, _put_attribute),
    "slots and attributes": Holder(SlotsAndMore, _attribute, _put_attribute),
    "Namespace": Holder(lambda k: argparse.Namespace(k=k), _attribute, _put_attribute),
    "SimpleNamespace": Holder(lambda k: types.SimpleNamespace(k=k), _attribute, _put_attribute),
    "dict": Holder(lambda k: {"k": k}, _item, _put_item),
    "dict with get": Holder(lambda k: {"k": k}, lambda h: h.get("k"), _put_item),
    "dict beside a tensor": Holder(lambda k: {"k": k, "x": torch.ones(2)}, _item, _put_item),
    "OrderedDict": Holder(lambda k: collections.OrderedDict(k=k), _item, _put_item),
    "defaultdict": Holder(lambda k: collections.defaultdict(float, k=k), _item, _put_item),
    "AttrDict": Holder(lambda k: AttrDict(k=k), _attribute, _put_item),
    "UserDict": Holder(lambda k: collections.UserDict(k=k), _item, _put_item),
    "ChainMap": Holder(lambda k: collections.ChainMap({}, {"k": k}), _item, lambda h, v: h.maps[1].update(k=v)),
    "mapping proxy": Holder(
        lambda k: types.MappingProxyType(HELD.setdefault("proxied", {}) | {"k": [k]}),
        lambda h: h["k"][0],
        lambda h, v: h["k"].__setitem__(0, v),
    ),
    "dict in dict": Holder(lambda k: {"a": {"k": k}}, lambda h: h["a"]["k"], lambda h, v: h["a"].update(k=v)),
    "object in dict in list": Holder(
        lambda k: [{"a": Box(k)}], lambda h: h[0]["a"].k, lambda h, v: _put_attribute(h[0]["a"], v)
    ),
    "list": Holder(lambda k: [k], _first, _put_first),
    "list beside a module": Holder(lambda k: [k, nn.Identity()], _first, _put_first),
    "list subclass": Holder(lambda k: MyList([k]), _first, _put_first),
    "UserList": Holder(lambda k: collections.UserList([k]), _first, _put_first),
    "list in a tuple": Holder(lambda k: ([k],), lambda h: h[0][0], lambda h, v: _put_first(h[0], v)),
    "list in a NamedTuple": Holder(lambda k: Named([k]), lambda h: h.inner[0], lambda h, v: _put_first(h.inner, v)),
    "deque": Holder(lambda k: collections.deque([k]), _first, _put_first),
    "last of a deque": Holder(lambda k: collections.deque([k]), lambda h: h[-1], lambda h, v: h.append(v)),
    "proxy": Holder(Proxy, _attribute, lambda h, v: h.__dict__["held"].update(k=v)),
    "own reads": Holder(OwnReads, _attribute, _put_attribute),
    "property": Holder(ByProperty, _attribute, lambda h, v: h._held.update(k=v)),
    "method": Holder(Method, lambda h: h.get(), _put_attribute),
    "bound method": Holder(lambda k: Method(k).get, lambda h: h(), lambda h, v: _put_attribute(h.__self__, v)),
    "callable": Holder(Method, lambda h: h(), _put_attribute),
    "vars": Holder(Box, lambda h: vars(h)["k"], _put_attribute),
    "__dict__": Holder(Box, lambda h: h.__dict__["k"], _put_attribute),
    "getattr": Holder(Box, lambda h: getattr(h, "k", None), _put_attribute),
    "class": Holder(lambda k: _class_value(OfClass, k), lambda h: OfClass.k, lambda h, v: setattr(OfClass, "k", v)),
    "class of an object": Holder(
        lambda k: _class_value(OfClass, k), lambda h: type(h).k, lambda h, v: setattr(OfClass, "k", v)
    ),
    "base class": Holder(_derived, _attribute, lambda h, v: setattr(Base, "k", v)),
    "derived class": Holder(_derived, _attribute, lambda h, v: setattr(Derived, "k", v)),
    "instance over class": Holder(lambda k: _class_value(OfClass, k), _attribute, _put_attribute),
    "module variable": Holder(
        lambda k: setattr(config, "k", k), lambda h: config.k, lambda h, v: setattr(config, "k", v)
    ),
    "module's dict": Holder(
        lambda k: setattr(config, "table", {"k": k}),
        lambda h: config.table["k"],
        lambda h, v: config.table.update(k=v),
    ),
    "global variable": Holder(_by_global, lambda h: VARIABLE, _set_global),
    "global dict": Holder(lambda k: HELD.update(k=k), lambda h: HELD["k"], lambda h, v: HELD.update(k=v)),
    "function attribute": Holder(_function, lambda h: h(), _put_attribute),
    "default argument": Holder(_default, lambda h: h(), lambda h, v: _put_first(h.__defaults__[0], v)),
    "default argument replaced": Holder(_default, lambda h: h(), lambda h, v: setattr(h, "__defaults__", ([v],))),
    "keyword default": Holder(_keyword_default, lambda h: h(), lambda h, v: h.__kwdefaults__.update(k=v)),
    "nonlocal": Holder(_nonlocal, lambda h: h(), lambda h, v: h.put(v)),
    "partial": Holder(lambda k: functools.partial(_identity, k=k), lambda h: h(), lambda h, v: h.keywords.update(k=v)),
    "weak reference": Holder(_weak, lambda h: h().k, lambda h, v: _put_attribute(h(), v)),
    "context variable": Holder(_context, lambda h: h.get(), lambda h, v: CONTEXT.set(v)),
    "default of a context variable": Holder(_defaulted, lambda h: h.get().k, lambda h, v: _put_attribute(h.get(), v)),
    "key of a dict": Holder(
        lambda k: {Box(k): 0}, lambda h: next(iter(h)).k, lambda h, v: _put_attribute(next(iter(h)), v)
    ),
    "optimizer": Holder(_optimizer, lambda h: h.param_groups[0]["held"], lambda h, v: h.param_groups[0].update(held=v)),
    "global object of a method": Holder(_by_box, lambda h: h.get(), _set_box),
    "global object of a property": Holder(_by_box, lambda h: h.k, _set_box),
    "global object of a special method": Holder(_by_box, lambda h: h["k"], _set_box),
    "global object of a descriptor": Holder(_by_box, lambda h: h.described, _set_box),
    "global object of an instance made in forward": Holder(_by_box, lambda h: type(h)().inner().get(), _set_box),
    "metaclass": Holder(
        lambda k: _class_value(Meta, k, WithMeta), lambda h: type(h).k, lambda h, v: setattr(Meta, "k", v)
    ),
    "computed name in a module": Holder(
        lambda k: setattr(config, "scale_a", k) or config,
        lambda h: getattr(h, "scale_" + NAMES[0]),
        lambda h, v: setattr(config, "scale_a", v),
    ),
    "computed name in vars": Holder(
        lambda k: setattr(config, "scale_a", k) or config,
        lambda h: vars(h)["scale_" + NAMES[0]],
        lambda h, v: setattr(config, "scale_a", v),
    ),
    "computed name in a class": Holder(
        lambda k: _class_value(OfClass, k), lambda h: getattr(type(h), chr(107)), lambda h, v: setattr(OfClass, "k", v)
    ),
    "members of a class": Holder(
        lambda k: _class_value(OfClass, k),
        lambda h: dict(members(OfClass))["k"],
        lambda h, v: setattr(OfClass, "k", v),
    ),
    "members of a derived class": Holder(
        _derived, lambda h: dict(members(Derived))["k"], lambda h, v: setattr(Base, "k", v)
    ),
    "members of an object": Holder(Box, lambda h: dict(members(h))["k"], _put_attribute),
    "fields of a dataclass": Holder(
        Fields, lambda h: next(getattr(h, f.name) for f in dataclasses.fields(h)), _put_attribute
    ),
    "a changed dataclass": Holder(Fields, lambda h: dataclasses.replace(h).k, _put_attribute),
    "a copy": Holder(Box, lambda h: copy.copy(h).k, _put_attribute),
    "static lookup": Holder(
        lambda k: _class_value(OfClass, k),
        lambda h: inspect.getattr_static(OfClass, chr(107)),
        lambda h, v: setattr(OfClass, "k", v),
    ),
    "attrgetter made in forward": Holder(
        lambda k: _class_value(OfClass, k),
        lambda h: operator.attrgetter(chr(107))(OfClass),
        lambda h, v: setattr(OfClass, "k", v),
    ),
    "getattr by another name": Holder(
        lambda k: _class_value(OfClass, k), lambda h: lookup(OfClass, chr(107)), lambda h, v: setattr(OfClass, "k", v)
    ),
    "dir": Holder(
        lambda k: _class_value(OfClass, k),
        lambda h: next(getattr(OfClass, name) for name in dir(OfClass) if name[0] != "_"),
        lambda h, v: setattr(OfClass, "k", v),
    ),
    "attrgetter": Holder(lambda k: _class_value(OfClass, k) and OfClass, K_OF, lambda h, v: setattr(OfClass, "k", v)),
    "globals": Holder(_by_global, lambda h: globals()["VARI" + "ABLE"], _set_global),
    "hidden module": Holder(lambda k: [Part(k)], lambda h: h[0].k, lambda h, v: _put_own(h[0], v)),
    "replaced __dict__": Holder(Box, _attribute, lambda h, v: setattr(h, "__dict__", {"k": v})),
    "replaced __dict__ of a module": Holder(
        lambda k: [Part(k)], lambda h: h[0].k, lambda h, v: setattr(h[0], "__dict__", {**vars(h[0]), "k": v})
    ),
}


class Net(nn.Module):
    """Multiplies by what ``read`` makes of the value in a holder, if ``inside``."""

    def __init__(self, held: Any, get: Callable[[Any], Any], read: Callable[[Any], Any], *, inside: bool) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(6, 8), nn.Linear(8, 4)
        self.held, self.get, self.read, self.inside = held, get, read, inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.linear(x).tanh())
        return x * self.read(self.get(self.held)) if self.inside else x
