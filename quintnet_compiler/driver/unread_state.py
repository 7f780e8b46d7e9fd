"""State that changes between steps and that no program reads, as logs and counters: a single trace shows that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..capture.versions import is_same
from ..guards.containers import ContainerSnapshot
from ..guards.trial import Trial
from ..ir.program import Captured


@dataclass
class UnreadState:
    """Finds what of changed containers a trace does not read.

    ``read``: containers that were found to be read, by their ``id``. ``names``: dicts with names in them that were.
    """

    read: dict[int, object] = field(default_factory=dict)
    names: dict[int, tuple[object, frozenset[object]]] = field(default_factory=dict)

    def without(self, captured: Captured, trace: Callable[[], Captured]) -> Captured | None:
        """Return ``captured`` with guards that ask no more for what containers hold that changed since.

        Return None if ``trace``, which traces again, does not show that it was not read. There is no trace if
        more changed, or if it is known to be read.
        """
        guards = captured.guards
        if guards is None:
            return None
        changed = [snapshot for snapshot in guards.containers.snapshots if not snapshot.holds()]
        if any(map(self._is_read, changed)):
            return None
        trial = Trial.of(guards)
        if trial is None:
            return None
        again = None
        try:
            again = trace()
        except Exception:  # of the user's code too, which met a stand-in: nothing was shown
            again = None
        finally:
            trial.put_back()
        unread = trial.unread
        if again is not None and unread is not None and is_same(captured, again):
            return replace(captured, guards=guards.without(unread))
        self._remember(trial, changed)
        return None

    def _is_read(self, snapshot: ContainerSnapshot) -> bool:
        key = id(snapshot.owner)
        return key in self.read or not self._names_in(snapshot.owner).isdisjoint(snapshot.changed_names())

    def _names_in(self, owner: object) -> frozenset[object]:
        return self.names.get(id(owner), (owner, frozenset()))[1]

    def _remember(self, trial: Trial, changed: list[ContainerSnapshot]) -> None:
        """Remember the names that a trial read, or if it read none, that all that changed may have been read."""
        for owner, names in trial.changed_reads:
            self.names[id(owner)] = owner, self._names_in(owner) | names
        if not trial.changed_reads:
            self.read.update((id(snapshot.owner), snapshot.owner) for snapshot in changed)
