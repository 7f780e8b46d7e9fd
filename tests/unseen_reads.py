"""Ways to read a value that pass by the methods of the class that holds it, or that name it in unusual places."""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import decimal
import enum
import functools
import inspect
import io
import logging
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any
from xml.etree.ElementTree import Element

import numpy
from torch import nn

from .changes_between_steps import Box, Holder, OwnSlots

settings = types.ModuleType("quintnet_test_settings")  # as a module of the user's own
settings.__file__ = __file__
sys.modules[settings.__name__] = settings

raw = object.__getattribute__
static = inspect.getattr_static
TEXT = "{0.k}"
FORMAT = TEXT.format
member = OwnSlots.__dict__["k"]


class BySuper(Box):
    def get(self) -> Any:
        return super().__getattribute__("k")


class Described:
    def __get__(self, owner: Any, kind: type) -> Any:
        return object.__getattribute__(owner, "_k")


class ByDescriptor:
    k = Described()

    def __init__(self, k: Any) -> None:
        self._k = k


class OfClass:
    k: Any = None


class Derived(OfClass):
    pass


class OwnReads(OfClass):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Meta(type):
    k: Any = None

    def get(cls) -> Any:
        return type.__getattribute__(cls, "k")


class WithMeta(metaclass=Meta):
    pass


@dataclasses.dataclass
class Defaults:
    k: Any = None
    list_of_k: Any = dataclasses.field(default_factory=list)


class Part(nn.Module):
    def __init__(self, k: Any) -> None:
        super().__init__()
        object.__setattr__(self, "k", k)


def _put(h: Any, value: Any) -> None:
    object.__setattr__(h, "k", value)


def _of_class(kind: type, of: type) -> Callable[[Any], Any]:
    def make(k: Any) -> Any:
        kind.k = k  # type: ignore[attr-defined]
        return of()

    return make


def _class(read: Callable[[Any], Any]) -> Holder:
    return Holder(_of_class(OfClass, Derived), read, lambda h, v: setattr(OfClass, "k", v))


def _module(read: Callable[[Any], Any]) -> Holder:
    return Holder(lambda k: setattr(settings, "k", k), read, lambda h, v: setattr(settings, "k", v))


def _default(k: Any) -> Defaults:
    dataclasses.fields(Defaults)[0].default = k  # type: ignore[misc]
    return Defaults()


def _put_default(h: Any, value: Any) -> None:
    _default(value)


def _factory(k: Any) -> Defaults:
    dataclasses.fields(Defaults)[1].default_factory = lambda: [k]  # type: ignore[misc]
    return Defaults()


def _put_factory(h: Any, value: Any) -> None:
    _factory(value)


def _imports(h: Any) -> Any:
    import quintnet_test_settings  # type: ignore[import-not-found]

    return quintnet_test_settings.k


def _imports_from(h: Any) -> Any:
    from quintnet_test_settings import k

    return k


def _matches(h: Any) -> Any:
    match OfClass:
        case type(k=k):  # type: ignore[misc]
            return k


def _missing(k: Any) -> Box:
    box = Box(k)
    box.other = box.__dict__.pop("k")
    return box


def _raw_or_other(h: Any) -> Any:
    try:
        return raw(h, "k")
    except AttributeError:
        return h.other


class Colour(enum.Enum):
    RED = [1.5]  # noqa: RUF012


class Number(int):
    k: float


def _member(k: float, owner: Any = Colour.RED) -> Any:
    owner.k = k
    return owner


def _named(k: float) -> Any:
    def read() -> None:
        pass

    read.__name__ = str(k)
    return read


def _put_builtin(k: float) -> None:
    builtins.quintnet_test_number = k  # type: ignore[attr-defined]


def _by_builtin(h: Any) -> Any:
    return quintnet_test_number  # type: ignore[name-defined]  # noqa: F821


def _derive(parent: type, k: float) -> type:
    KEPT.append(type("Child", (parent,), {"k": k, "__module__": __name__}))
    return parent


def _by_derived(h: Any) -> Any:
    return sum(kind.k for kind in h.__subclasses__())


def _language_field(k: float) -> Box:
    box = Box(0)
    box.__k__ = k  # type: ignore[attr-defined]
    return box


def _logger(k: float) -> logging.Logger:
    logger = logging.getLogger("quintnet test")
    logger.setLevel(int(k * 10))
    return logger


def _enabled(logger: logging.Logger) -> float:
    return 1.0 + sum(logger.isEnabledFor(level) for level in (10, 20))


KEPT: list[type] = []  # classes that only weak references would name
UNSEEN_READS = {
    "__getattribute__ of object": Holder(Box, lambda h: object.__getattribute__(h, "k"), _put),
    "by another name": Holder(Box, lambda h: raw(h, "k"), _put),
    "of a computed name": Holder(Box, lambda h: raw(h, chr(107)), _put),
    "in a partial": Holder(lambda k: functools.partial(raw, Box(k)), lambda h: h("k"), lambda h, v: _put(h.args[0], v)),
    "bound": Holder(lambda k: Box(k).__getattribute__, lambda h: h("k"), lambda h, v: _put(h.__self__, v)),
    "of super": Holder(BySuper, lambda h: h.get(), _put),
    "of the class": Holder(Box, lambda h: type(h).__getattribute__(h, "k"), _put),
    "methodcaller": Holder(Box, operator.methodcaller("__getattribute__", "k"), _put),
    "__dict__ by object": Holder(Box, lambda h: raw(h, "__dict__")["k"], _put),
    "getattr_static": Holder(Box, lambda h: inspect.getattr_static(h, "k"), _put),
    "getattr_static by another name": Holder(Box, lambda h: static(h, "k"), _put),
    "a list": Holder(lambda k: Box([k]), lambda h: raw(h, "k")[0], lambda h, v: h.k.__setitem__(0, v)),
    "a slot": Holder(OwnSlots, lambda h: object.__getattribute__(h, "k"), _put),
    "a slot by its descriptor": Holder(OwnSlots, lambda h: member.__get__(h), _put),
    "a descriptor": Holder(ByDescriptor, lambda h: h.k, lambda h, v: setattr(h, "_k", v)),
    "a hidden module": Holder(lambda k: [Part(k)], lambda h: raw(h[0], "k"), lambda h, v: _put(h[0], v)),
    "nothing yet": Holder(_missing, _raw_or_other, _put),
    "a class attribute": _class(lambda h: raw(h, "k")),
    "a class attribute, then the object's": Holder(_of_class(OfClass, Derived), lambda h: raw(h, "k"), _put),
    "a class": _class(lambda h: type.__getattribute__(type(h), "k")),
    "a class by getattr_static": _class(lambda h: static(Derived, "k")),
    "own __getattribute__": Holder(_of_class(OfClass, OwnReads), lambda h: h.k, lambda h, v: setattr(OfClass, "k", v)),
    "a metaclass": Holder(_of_class(Meta, WithMeta), lambda h: type(h).get(), lambda h, v: setattr(Meta, "k", v)),
    "a module": _module(lambda h: raw(settings, "k")),
    "a module of a computed name": _module(lambda h: types.ModuleType.__getattribute__(settings, chr(107))),
    "a default of a dataclass": Holder(_default, lambda h: dataclasses.fields(Defaults)[0].default, _put_default),
    "a default of an instance": Holder(_default, lambda h: dataclasses.fields(h)[0].default, _put_default),
    "a default by its name": Holder(
        _default, lambda h: {f.name: f.default for f in dataclasses.fields(h)}["k"], _put_default
    ),
    "a factory of a dataclass": Holder(
        _factory,
        lambda h: dataclasses.fields(h)[1].default_factory()[0],  # type: ignore[misc]
        _put_factory,
    ),
    "an import in forward": _module(_imports),
    "an import of a name in forward": _module(_imports_from),
    "a module by its path": _module(lambda h: sys.modules["quintnet_test_settings"].k),
    "a match": _class(_matches),
    "a format": Holder(_of_class(OfClass, Derived), lambda h: float(TEXT.format(OfClass)), _class(len).put),
    "a bound format": Holder(_of_class(OfClass, Derived), lambda h: float(FORMAT(OfClass)), _class(len).put),
    "a bound method of a dict": Holder(lambda k: {"k": k}.get, lambda h: h("k"), lambda h, v: h.__self__.update(k=v)),
    "a weak proxy": Holder(
        lambda k: (lambda box: {"box": box, "proxy": weakref.proxy(box)})(Box(k)),
        lambda h: h["proxy"].k,
        lambda h, v: _put(h["box"], v),
    ),
    "an attribute of a member of an enumeration": Holder(_member, lambda h: h.k, _put),
    "a value in a member of an enumeration": Holder(
        lambda k: Colour.RED.value.__setitem__(0, k) or Colour.RED,
        lambda h: next(iter(Colour)).value[0],
        lambda h, v: h.value.__setitem__(0, v),
    ),
    "an attribute of a number": Holder(lambda k: _member(k, Number(1)), lambda h: h.k, _put),
    "a view of a dict": Holder(
        lambda k: (lambda held: {"dict": held, "view": held.values()})({"k": k}),
        lambda h: next(iter(h["view"])),
        lambda h, v: h["dict"].update(k=v),
    ),
    "an object in an array": Holder(
        lambda k: numpy.array([Box(k), None], dtype=object), lambda h: h[0].k, lambda h, v: _put(h[0], v)
    ),
    "a record of an array": Holder(
        lambda k: numpy.array([(k,)], dtype=[("k", "f8")])[0],
        lambda h: float(h["k"]),
        lambda h, v: h.__setitem__("k", v),
    ),
    "a number of C": Holder(ctypes.c_double, lambda h: h.value, lambda h, v: setattr(h, "value", v)),
    "text in memory": Holder(
        lambda k: io.StringIO(str(k)), lambda h: float(h.getvalue()), lambda h, v: (h.seek(0), h.write(str(v)))[0]
    ),
    "an argument of an exception": Holder(
        lambda k: ValueError([k]), lambda h: h.args[0][0], lambda h, v: h.args[0].__setitem__(0, v)
    ),
    "an attribute of an element of XML": Holder(
        lambda k: Element("a", k=str(k)), lambda h: float(h.get("k")), lambda h, v: h.set("k", str(v))
    ),
    "the precision of a decimal context": Holder(
        lambda k: decimal.Context(prec=int(k * 4)), lambda h: h.prec / 4, lambda h, v: setattr(h, "prec", int(v * 4))
    ),
    "a name of builtins": Holder(_put_builtin, _by_builtin, lambda h, v: _put_builtin(v)),
    "the name of a class": Holder(
        lambda k: setattr(OfClass, "__name__", str(k)),
        lambda h: float(OfClass.__name__),
        lambda h, v: setattr(OfClass, "__name__", str(v)),
    ),
    "derived classes": Holder(
        lambda k: _derive(type("Parent", (), {"k": 0, "__module__": __name__}), k), _by_derived, _derive
    ),
    "a field with a name of the language": Holder(
        _language_field, lambda h: h.__k__, lambda h, v: setattr(h, "__k__", v)
    ),
    "a logger": Holder(_logger, lambda h: _enabled(h), lambda h, v: _logger(v)),
    "members of a WeakSet": Holder(
        lambda k: (lambda box: {"box": box, "set": weakref.WeakSet([box])})(Box(k)),
        lambda h: sum(box.k for box in h["set"]),
        lambda h, v: _put(h["box"], v),
    ),
    "array.flat": Holder(lambda k: numpy.array([k]).flat, lambda h: float(h[0]), lambda h, v: h.base.fill(v)),
    "the name of a function": Holder(
        lambda k: _named(k), lambda h: float(h.__name__), lambda h, v: setattr(h, "__name__", str(v))
    ),
}
