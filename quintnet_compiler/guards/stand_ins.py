"""Stand-ins for values: they show whether a trace uses them. Nothing else looks into them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

_OPERATIONS = (
    "add and bool bytes call complex contains delitem divmod enter eq exit float floordiv format ge getitem gt hash "
    "index int invert iter le len lshift lt matmul mod mul ne neg next or pos pow radd rand rdivmod repr reversed "
    "rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem str sub truediv "
    "trunc xor"
)


class UnreadStateUsed(Exception):
    """A trace used what it was thought not to read."""


class StandIn:
    """A stand-in for a value of a container."""


class Tripwire(StandIn):
    """Stands where a container had a value. Whoever uses it, but for its identity and its class, raises."""

    def __init__(self, kind: type) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "touched", False)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, "kind")
        _touch(self)

    def __setattr__(self, name: str, value: Any) -> None:
        _touch(self)


def _touch(wire: Tripwire, *operands: Any) -> Any:
    object.__setattr__(wire, "touched", True)
    raise UnreadStateUsed


for _name in _OPERATIONS.split():
    setattr(Tripwire, f"__{_name}__", _touch)


def touched(wire: Tripwire) -> bool:
    """Return whether a tripwire was used."""
    return bool(object.__getattribute__(wire, "touched"))


class RecordingDict(StandIn, dict[Any, Any]):
    """A dict that records which names are read, and whether more than single ones are.

    A read of one of ``changed`` raises. Reads by other ways than its methods find tripwires.
    """

    held: dict[Any, Any]
    changed: frozenset[Any]
    wires: list[Tripwire]
    names: dict[Any, None]
    all_read: bool

    @property
    def single_names(self) -> tuple[Any, ...] | None:
        """The names that were read; None if there may be others, or if none was."""
        if self.all_read or any(map(touched, self.wires)):
            return None
        return tuple(self.names) or None

    @property
    def changed_names(self) -> frozenset[Any]:
        """The names that were read and have other values than they had."""
        return self.changed & self.names.keys()


def _one(name: str) -> Callable[..., Any]:
    def read(recorder: RecordingDict, key: Any, *arguments: Any) -> Any:
        recorder.names[key] = None
        if key in recorder.changed:
            raise UnreadStateUsed
        return getattr(recorder.held, name)(key, *arguments)

    return read


def _all(name: str) -> Callable[..., Any]:
    def read(recorder: RecordingDict, *arguments: Any) -> Any:
        recorder.all_read = True
        return getattr(recorder.held, name)(*arguments)

    return read


_OF_ONE = ("__getitem__", "__contains__", "get")
_OF_ALL = (
    *("__len__", "__iter__", "__reversed__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
    *("__setitem__", "__delitem__", "setdefault", "keys", "values", "items", "copy", "pop", "popitem", "clear"),
    *("update", "move_to_end", "__reduce_ex__"),
)
for _name in _OF_ONE:
    setattr(RecordingDict, _name, _one(_name))
for _name in _OF_ALL:
    setattr(RecordingDict, _name, _all(_name))


class _RecordingOrderedDict(RecordingDict, OrderedDict):  # type: ignore[type-arg]
    pass


class _RecordingDefaultDict(RecordingDict, defaultdict):  # type: ignore[type-arg]
    pass


RECORDING: dict[type, type[RecordingDict]] = {
    dict: RecordingDict,
    OrderedDict: _RecordingOrderedDict,
    defaultdict: _RecordingDefaultDict,
}


def recording_dict(owner: Any, changed: frozenset[Any] = frozenset()) -> RecordingDict:
    """Return a dict with what ``owner`` holds, of the kind of ``owner``, that records its reads.

    None of the names ``changed`` is to be read.
    """
    recorder = RECORDING[type(owner)]()
    recorder.held, recorder.wires, recorder.names, recorder.all_read = copy.copy(owner), [], {}, False
    recorder.changed = changed
    for name, value in owner.items():
        recorder.wires.append(Tripwire(type(value)))
        dict.__setitem__(recorder, name, recorder.wires[-1])
    return recorder
