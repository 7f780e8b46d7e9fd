"""Which attributes a trace reads: recorded while it runs, so that their values can be compared before later steps."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .python_state import CODE, OWN, PLAIN, AttributeSnapshot

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made, whose attributes can be set
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "quintnet", "quintnet_compiler"}


@dataclass(frozen=True)
class Read:
    """An attribute that was read: where it lies now, and its name for people."""

    label: str
    owner: Any
    name: str


@dataclass
class Reads:
    """Records what is read of the objects that it was told of, and of those that it meets on the way.

    ``state``: every object that is met is remembered there as it was.
    """

    state: AttributeSnapshot
    found: list[Read] = field(default_factory=list)
    _labels: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _classes: dict[type, tuple[bool, Any]] = field(
        default_factory=dict
    )  # whether it had a method of its own, and which

    def meet(self, label: str, value: Any) -> None:
        """From now on, ``value`` (and what lists and dicts of it hold) is recorded, where it is a plain object."""
        if isinstance(value, nn.Module):
            self._labels.setdefault(id(value), (label, value))
        elif isinstance(value, (list, tuple)):
            for i, one in enumerate(value[:64]):
                if not isinstance(one, PLAIN):
                    self.meet(f"{label}[{i}]", one)
        elif isinstance(value, dict):
            for name, one in list(value.items())[:64]:
                if not isinstance(one, PLAIN):
                    self.meet(f"{label}[{name!r}]", one)
        elif has_fields(value) and id(value) not in self._labels:
            self._labels[id(value)] = label, value
            self.state.add(label, value)
            self._watch(type(value))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._watch(nn.Module)
        try:
            yield
        finally:
            for kind, (own, method) in self._classes.items():
                if own:
                    kind.__getattribute__ = method  # type: ignore[method-assign]
                else:
                    del kind.__getattribute__
            self._classes.clear()

    def _watch(self, kind: type) -> None:
        if any(one in self._classes for one in kind.__mro__):
            return
        method: Any = kind.__getattribute__
        self._classes[kind] = "__getattribute__" in vars(kind), method
        seen, labels = self._seen, self._labels

        def read(this: Any, name: str) -> Any:
            value = method(this, name)
            key = (id(this), name)
            if key not in seen and name not in OWN and id(this) in labels:
                seen.add(key)
                self._note(this, name, value)
            return value

        kind.__getattribute__ = read  # type: ignore[assignment,method-assign]

    def _note(self, owner: Any, name: str, value: Any) -> None:
        if name.startswith("__"):
            return
        label = f"{self._labels[id(owner)][0]}.{name}".removeprefix(".")
        if name not in object.__getattribute__(owner, "__dict__"):
            found = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
            if found is not value or isinstance(found, CODE) or hasattr(type(found), "__get__"):
                return  # methods and properties: what they read is recorded
            if name in vars(nn.Module):
                return
        self.found.append(Read(label, owner, name))
        if not isinstance(value, (*PLAIN, Tensor)):
            self.meet(label, value)


def has_fields(value: Any) -> bool:
    """Whether a value is an object of a class that Python code outside of torch and the standard library made."""
    kind = type(value)
    if isinstance(value, (nn.Module, Tensor, *PLAIN, *CODE, types.GeneratorType)):
        return False
    if kind.__module__.partition(".")[0] in _FOREIGN - {"__main__"}:
        return False
    return bool(kind.__flags__ & _HEAP) and isinstance(getattr(value, "__dict__", None), dict)
