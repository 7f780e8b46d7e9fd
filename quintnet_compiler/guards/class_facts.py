"""Guards of facts about classes that are no variables of them: names, base classes, derived classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from .by_name import is_users

Fact = Callable[[Any], Any]
_subclasses: Callable[[type], list[type]] = type.__subclasses__

# By the name that functions look up.
_FACTS: dict[str, Fact] = {
    "__name__": attrgetter("__name__"),
    "__qualname__": attrgetter("__qualname__"),
    "__bases__": attrgetter("__bases__"),
    "__base__": attrgetter("__base__"),
    "__mro__": attrgetter("__mro__"),
    "mro": attrgetter("__mro__"),
    "__subclasses__": _subclasses,
}


def derived_classes(kinds: Iterable[type]) -> list[type]:
    """Return the classes that are derived from ``kinds`` at once."""
    return [derived for kind in kinds for derived in _subclasses(kind)]


@dataclass(frozen=True)
class ClassFacts:
    """Facts about classes, as they were. ``compared``: the classes."""

    compared: tuple[type, ...]
    facts: tuple[Fact, ...]
    then: list[list[Any]] = field(init=False)

    @classmethod
    def of(cls, spaces: Iterable[tuple[str, Any]], names: Set[str]) -> ClassFacts:
        """Return guards of what ``names`` say of the users' classes among ``spaces``."""
        facts = tuple(fact for name, fact in _FACTS.items() if name in names)
        kinds = tuple(space for _, space in spaces if isinstance(space, type) and is_users(space))
        return cls(kinds if facts else (), facts)

    def __post_init__(self) -> None:
        """Take the facts of now."""
        object.__setattr__(self, "then", self._now())

    def _now(self) -> list[list[Any]]:
        return [list(map(fact, self.compared)) for fact in self.facts]

    def hold(self) -> bool:
        """Return whether the classes are as they were."""
        return self._now() == self.then

    def broken(self) -> list[str]:
        """Say which classes are not."""
        changed = {
            kind.__name__: None
            for values, others in zip(self._now(), self.then, strict=True)
            for kind, value, other in zip(self.compared, values, others, strict=True)
            if value != other
        }
        return [f"{name} has another name, other base classes or other derived classes than it had" for name in changed]
