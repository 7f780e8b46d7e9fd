"""A trace that is made again with stand-ins, to show that it does not read what changed."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .containers import ContainerSnapshot, reading_of
from .guards import Guards
from .reach import Unread
from .stand_ins import RECORDING, RecordingDict, StandIn, Tripwire, recording_dict, touched

_NUMBERS = (int, float)  # whose identity nobody asks for; that of an enumeration's members is compared


@dataclass
class Trial:
    """Stand-ins in the places of what changed, while a trace is made again."""

    guards: Guards
    recorders: list[tuple[ContainerSnapshot, RecordingDict]] = field(default_factory=list)
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
            return self._record(snapshot)
        return all(self._wire(snapshot, name) for name in snapshot.unread)

    def _stand_in(self, snapshot: ContainerSnapshot) -> bool:
        if any(recorded is snapshot for recorded, _ in self.recorders):
            return True
        if type(snapshot.owner) in RECORDING:
            return self._record(snapshot)
        holders = self._holders(snapshot.owner)
        if holders and all(isinstance(holder, ContainerSnapshot) for holder, _ in holders):
            return all(self._wire(holder, name) for holder, name in holders)
        names = snapshot.changes()
        if names is None or not isinstance(snapshot.owner, (list, deque)):
            return False
        return all(self._wire(snapshot, name) for name in names)

    def _record(self, snapshot: ContainerSnapshot) -> bool:
        changed = snapshot.changed_names()
        recorder, holders = recording_dict(snapshot.owner, changed), self._holders(snapshot.owner)
        for holder, name in holders:
            self._set(holder.owner if isinstance(holder, ContainerSnapshot) else holder, name, recorder)
        self.recorders.append((snapshot, recorder))
        return bool(holders)

    def _wire(self, snapshot: ContainerSnapshot, name: Any) -> bool:
        value = snapshot.owner[name]
        if isinstance(value, StandIn):
            return True
        if type(value) not in _NUMBERS and reading_of(value) is None:
            return False
        wire = Tripwire(type(value))
        self._set(snapshot.owner, name, wire)
        self.wires.append((snapshot, name, wire))
        return True

    def _holders(self, value: Any) -> list[tuple[Any, Any]]:
        """Everywhere that a value is held, with its name there: snapshots of containers, and namespaces."""
        places: list[tuple[Any, Any]] = []
        for snapshot in self.guards.containers.snapshots:
            places += [(snapshot, name) for name, x in snapshot.named_values() if x is value]
        return places + [(space, name) for _, space, name, x in self.guards.same.rows if x is value]

    def _set(self, space: MutableMapping[Any, Any], name: Any, value: Any) -> None:
        old = space[name]
        space[name] = value
        self.undo.append(functools.partial(space.__setitem__, name, old))

    def put_back(self) -> None:
        """Put everything where it was."""
        while self.undo:
            self.undo.pop()()

    @property
    def unread(self) -> dict[int, Unread] | None:
        """Return what the trace was shown not to read, by the ``id`` of what holds it.

        Return None if it read what changed, or if a stand-in that is somewhere where forward reads saw nothing.
        """
        if self.changed_reads or any(recorder.single_names is None for _, recorder in self.recorders):
            return None
        if any(touched(wire) for _, _, wire in self.wires):
            return None
        unread = {id(snapshot.owner): Unread(only=recorder.single_names) for snapshot, recorder in self.recorders}
        for snapshot, name, _ in self.wires:
            part = unread.get(id(snapshot.owner), Unread(snapshot.unread))
            if part.only is None:
                unread[id(snapshot.owner)] = Unread(part.names | {name})
        return unread

    @property
    def changed_reads(self) -> list[tuple[Any, frozenset[Any]]]:
        """Return the dicts of which the trace read names that have other values now, with these names."""
        rows = [(snapshot.owner, recorder.changed_names) for snapshot, recorder in self.recorders]
        return [(owner, names) for owner, names in rows if names]
