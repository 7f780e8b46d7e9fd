"""class_facts: names, base classes and derived classes of the classes that functions ask for them."""

from __future__ import annotations

from typing import Any

from torch import nn

from quintnet_compiler.guards.class_facts import ClassFacts, derived_classes


class Base:
    pass


class Other:
    pass


def _guards(kind: type, *names: str) -> ClassFacts:
    spaces: list[tuple[str, Any]] = [("kind", kind), ("nn", nn), ("Linear", nn.Linear)]
    return ClassFacts.of(spaces, set(names))


def test_a_name_and_base_classes() -> None:
    kind = type("Kind", (Base,), {"__module__": __name__})
    guards = _guards(kind, "__name__", "__bases__")
    assert guards.compared == (kind,) and guards.hold() and guards.broken() == []
    kind.__bases__ = (Other,)
    assert not guards.hold() and len(guards.broken()) == 1
    kind.__bases__ = (Base,)
    kind.__name__ = "Other"
    assert not guards.hold()


def test_derived_classes() -> None:
    kind = type("Kind", (Base,), {"__module__": __name__})
    guards = _guards(kind, "__subclasses__")
    derived = type("Derived", (kind,), {})
    assert not guards.hold() and derived_classes([kind]) == [derived]


def test_what_nobody_asks_for_is_not_compared() -> None:
    assert _guards(Base, "forward").compared == ()
