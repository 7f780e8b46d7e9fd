"""What was captured of a module under several settings of its attributes, modes and flags; the latest few are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.program import Captured, DistributedProgram

KEPT = 8  # of each kind


@dataclass(frozen=True)
class Version:
    """A capture, and the programs that were made of it, by number of rows."""

    captured: Captured
    made: dict[int, DistributedProgram] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the module is as it was captured."""
        return self.captured.guards is None or self.captured.guards.hold()


class CapturedVersions:
    """The versions of each kind of program, the one used last at the front."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Version]] = {}
        self._first: dict[str, Version] = {}

    def look(self, kind: str) -> Version | None:
        """The version that was made of the module as it is now."""
        kept = self._kept.get(kind, [])
        for index, version in enumerate(kept):
            if version.holds:
                if index:
                    kept.insert(0, kept.pop(index))
                return version
        return None

    def add(self, kind: str, captured: Captured) -> Version:
        version = Version(captured)
        self._kept[kind] = [version, *self._kept.get(kind, [])[: KEPT - 1]]
        self._first.setdefault(kind, version)
        return version

    def difference(self, kind: str, found: Version | None) -> str:
        """What is not as it was at the first capture, for people; "" if all is."""
        first = self._first.get(kind)
        if first is None or found is first or first.captured.guards is None:
            return ""
        return "; ".join(first.captured.guards.broken())
