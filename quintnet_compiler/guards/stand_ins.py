"""What stands in the place of a value, to show whether a trace uses it. Nobody else looks into it."""

from __future__ import annotations

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
    """What stands where a container had a value."""


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
