"""State that changes between steps and that no program reads, as logs and counters: it leads to no further trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..guards.guards import Guards
from ..guards.trial import Trial
from ..ir.program import Captured


@dataclass
class UnreadState:
    """Finds what of changed containers a trace does not read. ``read``: containers that were found to be read."""

    read: dict[int, object] = field(default_factory=dict)

    def without(self, then: Guards | None, now: Captured, trace: Callable[[], Captured]) -> Captured:
        """Return ``now``, a capture that is as one before it, with guards that ask no more for what differs from
        ``then``, the guards of that one, if ``trace`` shows that it is not read."""
        if then is None or now.guards is None:
            return now
        changed = [snapshot.owner for snapshot in then.containers.snapshots if not snapshot.holds()]
        if any(id(owner) in self.read for owner in changed):
            return now
        trial = Trial.of(then)
        if trial is None:
            return now
        unread = None
        try:
            again = trace()
            if str(again.graph) == str(now.graph):
                unread = trial.unread
        except Exception:  # of the user's code too, which met a stand-in: nothing was shown
            unread = None
        finally:
            trial.put_back()
        if unread is None:
            self.read.update((id(owner), owner) for owner in changed)
            return now
        return replace(now, guards=now.guards.without(unread))
