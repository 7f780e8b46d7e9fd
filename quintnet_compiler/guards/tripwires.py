"""Stand-ins that show whether a trace reads what a container holds."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .containers import ContainerSnapshot, reader_of
from .guards import Guards
from .reach import Unread
from .stand_ins import StandIn, Tripwire, touched

_NUMBERS = (int, float)  # whose identity nobody asks for; an enumeration's members are compared by it


class _Watching(StandIn, dict[Any, Any]):
    """A dict that records which names are read, and whether more than single ones are."""

    names: dict[Any, None]
    all_read: bool

    def _all(self, name: str, *arguments: Any) -> Any:
        self.all_read = True
        return getattr(super(), name)(*arguments)

    def _one(self, name: str, key: Any, *arguments: Any) -> Any:
        self.names[key] = None
        return getattr(super(), name)(key, *arguments)


def _recorder(name: str, record: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *arguments: record(self, name, *arguments)


for _name in ("__getitem__", "__contains__", "get", "__setitem__", "__delitem__", "setdefault"):
    setattr(_Watching, _name, _recorder(_name, _Watching._one))
for _name in (
    *("__len__", "__iter__", "__reversed__", "__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"),
    *("keys", "values", "items", "copy", "pop", "popitem", "clear", "update", "__reduce_ex__"),
):
    setattr(_Watching, _name, _recorder(_name, _Watching._all))


class _WatchingOrdered(_Watching, OrderedDict):  # type: ignore[type-arg]
    pass


class _WatchingDefault(_Watching, defaultdict):  # type: ignore[type-arg]
    pass


_WATCHING: dict[type, Callable[[Any], _Watching]] = {
    dict: lambda _: _Watching(),
    OrderedDict: lambda _: _WatchingOrdered(),
    defaultdict: lambda owner: _WatchingDefault(owner.default_factory),
}


def _watching(owner: Any) -> _Watching:
    watched = _WATCHING[type(owner)](owner)
    watched.names, watched.all_read = {}, False
    for name, value in owner.items():
        dict.__setitem__(watched, name, value)
    if isinstance(owner, OrderedDict):
        for name, value in owner.items():
            OrderedDict.__setitem__(watched, name, value)
    watched.names.clear()
    watched.all_read = False
    return watched


@dataclass
class Trial:
    """Stand-ins in the places of what changed, while a trace is made again."""

    guards: Guards
    watched: list[tuple[ContainerSnapshot, _Watching]] = field(default_factory=list)
    wires: list[tuple[ContainerSnapshot, Any, Tripwire]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, guards: Guards) -> Trial | None:
        """Return a trial of all that differs now from what ``guards`` saw; None if some of it cannot be tried."""
        trial = cls(guards)
        snapshots = guards.containers.snapshots
        changed = [snapshot for snapshot in snapshots if not snapshot.holds()]
        try:
            possible = changed and guards.only_containers_differ() and all(map(trial._stand_in_again, snapshots))
            if possible and all(map(trial._stand_in, changed)):
                return trial
        except Exception:  # a container that does not let itself be changed
            pass
        trial.put_back()
        return None

    def _stand_in_again(self, snapshot: ContainerSnapshot) -> bool:
        """Stand in for what an earlier trace did not read: this one may, as other values are others now."""
        if snapshot.only is not None:
            return self._watch(snapshot)
        return all(self._wire(snapshot, name) for name in snapshot.unread)

    def _stand_in(self, snapshot: ContainerSnapshot) -> bool:
        if any(known is snapshot for known, _ in self.watched):
            return True
        if type(snapshot.owner) in _WATCHING:
            return self._watch(snapshot)
        holders = self._holders(snapshot.owner)
        if holders and all(isinstance(holder, ContainerSnapshot) for holder, _ in holders):
            return all(self._wire(holder, name) for holder, name in holders)
        names = snapshot.changes()
        if names is None or not isinstance(snapshot.owner, (list, deque)):
            return False
        return all(self._wire(snapshot, name) for name in names)

    def _watch(self, snapshot: ContainerSnapshot) -> bool:
        watched, holders = _watching(snapshot.owner), self._holders(snapshot.owner)
        for holder, name in holders:
            self._set(holder.owner if isinstance(holder, ContainerSnapshot) else holder, name, watched)
        self.watched.append((snapshot, watched))
        return bool(holders)

    def _wire(self, snapshot: ContainerSnapshot, name: Any) -> bool:
        value = snapshot.owner[name]
        if isinstance(value, StandIn):
            return True
        if type(value) not in _NUMBERS and reader_of(value) is None:
            return False
        wire = Tripwire(type(value))
        self._set(snapshot.owner, name, wire)
        self.wires.append((snapshot, name, wire))
        return True

    def _holders(self, value: Any) -> list[tuple[Any, Any]]:
        """Everywhere that a value is held, with its name there: snapshots of containers, and namespaces."""
        places: list[tuple[Any, Any]] = []
        for snapshot in self.guards.containers.snapshots:
            held = zip(snapshot._names(), snapshot.values(), strict=True)
            places += [(snapshot, name) for name, x in held if x is value]
        same = self.guards.same
        rows = zip(same.spaces, same.names, same.values, strict=True)
        return places + [(space, name) for space, name, x in rows if x is value]

    def _set(self, space: MutableMapping[Any, Any], name: Any, value: Any) -> None:
        before = space[name]
        space[name] = value
        self.undo.append(functools.partial(space.__setitem__, name, before))

    def put_back(self) -> None:
        """Put everything where it was."""
        while self.undo:
            self.undo.pop()()

    @property
    def unread(self) -> dict[int, Unread] | None:
        """What the trace was shown not to read, by the ``id`` of what holds it; None if it read what changed, or if a
        stand-in that is somewhere where forward reads saw nothing."""
        if any(x.all_read or not x.names for _, x in self.watched) or any(touched(wire) for _, _, wire in self.wires):
            return None
        unread = {id(snapshot.owner): Unread(only=tuple(x.names)) for snapshot, x in self.watched}
        for snapshot, name, _ in self.wires:
            part = unread.get(id(snapshot.owner), Unread(snapshot.unread))
            if part.only is None:
                unread[id(snapshot.owner)] = Unread(part.names | {name})
        return unread
