"""Attributes and variables of Python objects as namespaces, of whatever kind they are kept in."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping
from typing import Any


class Missing:
    """Stands for an attribute that is not there."""


MISSING = Missing()


class Cell(MutableMapping[str, Any]):
    """The variable of a closure as a namespace."""

    def __init__(self, name: str, cell: types.CellType) -> None:
        self.name, self.cell = name, cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError as error:  # not set
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([self.name] if self.name in self else [])

    def __contains__(self, name: object) -> bool:
        return self.get(self.name, MISSING) is not MISSING

    def __len__(self) -> int:
        return len(list(iter(self)))


def slot_names(kind: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class keeps in slots."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    members = ((name, x) for base in bases for name, x in vars(base).items())
    return tuple(name for name, x in members if isinstance(x, types.MemberDescriptorType))


class SlotFields(MutableMapping[str, Any]):
    """The attributes of an object that its class keeps in slots, as a namespace."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def _member(self, name: str) -> types.MemberDescriptorType:
        member = next((vars(kind)[name] for kind in type(self.owner).__mro__ if name in vars(kind)), None)
        if not isinstance(member, types.MemberDescriptorType):
            raise KeyError(name)
        return member

    def __getitem__(self, name: str) -> Any:
        try:
            return self._member(name).__get__(self.owner)
        except AttributeError as error:  # not set
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        self._member(name).__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self._member(name).__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in slot_names(type(self.owner)) if name in self)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), MISSING) is not MISSING

    def __len__(self) -> int:
        return len(list(iter(self)))


def space_of(owner: Any, name: str) -> MutableMapping[str, Any] | None:
    """Return the namespace of an object's own that has a name; None if there is none."""
    try:
        fields: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        fields = {}
    if name in fields:
        return fields
    slots = SlotFields(owner)
    return slots if name in slots else None


class Fields(MutableMapping[str, Any]):
    """The attributes of a class or a Python module as a namespace, without those of the language."""

    def __init__(self, owner: type | types.ModuleType) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(vars(self.owner)) if not name.startswith("__"))

    def __len__(self) -> int:
        return len(list(iter(self)))
