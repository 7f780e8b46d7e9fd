"""Pickles as data: what they say of objects is read, and no class or function that they name is looked up."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO


class Pickled:
    """An object in a pickle: what it was made with, the state that it was given, and what was put into it."""

    kind: tuple[str, str] = ("", "")

    def __new__(cls, *args: Any, **_: Any) -> Pickled:
        """Keep what it was made with."""
        pickled = object.__new__(cls)
        pickled.args, pickled.state, pickled.entries = args, None, []
        return pickled

    args: tuple[Any, ...]
    state: Any
    entries: list[Any]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: :meth:`__new__` has kept it."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state that it was given."""
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep an entry of a dict."""
        self.entries.append((key, value))

    def append(self, value: Any) -> None:
        """Keep an item of a list."""
        self.entries.append(value)

    def extend(self, values: Any) -> None:
        """Keep items of a list."""
        self.entries.extend(values)


class _Reader(pickle.Unpickler):
    """Every name is a class of records, made for it: nothing of this process can be reached."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._kinds: dict[tuple[str, str], type[Pickled]] = {}

    def find_class(self, module: str, name: str) -> type[Pickled]:
        kind = module, name
        if kind not in self._kinds:
            self._kinds[kind] = type("Pickled", (Pickled,), {"kind": kind})
        return self._kinds[kind]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a reference to something outside of the file")


def records_in(file: BinaryIO) -> Any:
    """Return what a pickle holds: numbers, texts, lists, tuples, dicts, and a :class:`Pickled` for anything else.

    Raises:
        ValueError: if it is none.
    """
    try:
        return _Reader(file).load()
    except Exception as error:  # whatever a damaged file makes of it
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from None
