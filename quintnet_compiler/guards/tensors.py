"""Guards of tensors: those that are constant in a graph, those that became Python numbers, and how many there are."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from ..compat.torch import version
from ..compat.torch_codegen import SHIPPED

_FLAG = attrgetter("requires_grad")
_SHAPE = attrgetter("shape")


@dataclass(frozen=True)
class Constants:
    """Tensors that are constant in the graph: nobody wrote to ``tensors``, nor gave them other attributes; ``stored``,
    these and others that have memory of their own, are where they were, and have the shapes that they had."""

    tensors: tuple[Tensor, ...]
    versions: list[int]
    stored: tuple[Tensor, ...]
    pointers: list[int] = field(init=False)
    shapes: list[Any] = field(init=False)
    flags: list[bool] = field(init=False)
    fields: tuple[dict[str, Any], ...] = field(init=False)
    attributes: list[Any] = field(init=False)  # what all of these hold, as Python's collector of garbage lists it

    @classmethod
    def of(cls, tensors: Iterable[tuple[Tensor, int]], others: Iterable[Tensor] = ()) -> Constants:
        """Return guards of tensors with their versions when they were read; the values of ``others`` may change."""
        rows = tuple(tensors)
        own = tuple(x for x, _ in rows)
        return cls(own, [number for _, number in rows], tuple(x for x in (*own, *others) if pointer(x) is not None))

    def __post_init__(self) -> None:
        object.__setattr__(self, "pointers", list(map(Tensor.data_ptr, self.stored)))
        object.__setattr__(self, "shapes", list(map(_SHAPE, self.stored)))
        object.__setattr__(self, "flags", list(map(_FLAG, self.tensors)))
        object.__setattr__(self, "fields", tuple(map(vars, self.tensors)))
        object.__setattr__(self, "attributes", gc.get_referents(*self.fields))

    def hold(self) -> bool:
        return not (self.tensors or self.stored) or (
            list(map(version, self.tensors)) == self.versions
            and list(map(Tensor.data_ptr, self.stored)) == self.pointers
            and list(map(_SHAPE, self.stored)) == self.shapes
            and self._attributes_hold()
        )

    def _attributes_hold(self) -> bool:
        """Return whether the tensors have the flags ``requires_grad``, and the attributes of users, that they had."""
        if list(map(_FLAG, self.tensors)) != self.flags:
            return False
        now = gc.get_referents(*self.fields)
        return len(now) == len(self.attributes) and all(map(is_, now, self.attributes))

    def broken(self) -> list[str]:
        if not (self.tensors or self.stored) or self.hold():
            return []
        how = "was changed in place" if self._attributes_hold() else "has other attributes than it had"
        return [f"a tensor that forward uses as a constant {how}"]


@dataclass(frozen=True)
class Values:
    """Tensors in host memory whose values became Python numbers: ``values``.

    Others can write to that memory unseen, as through ``x.numpy()`` or ``x.data``.
    """

    tensors: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Values:
        """Return guards of the values that these tensors have now, but for those on accelerators."""
        on_host = tuple(x.detach() for x in tensors if x.device.type == "cpu")
        return cls(on_host, tuple(x.clone() for x in on_host))

    def hold(self) -> bool:
        """Return whether they have these values."""
        return not self.tensors or all(map(same_values, self.tensors, self.values))

    def broken(self) -> list[str]:
        """Say that they have others."""
        return [] if self.hold() else ["a tensor that forward reads in Python has other values"]


@dataclass(frozen=True)
class Registered:
    """How many parameters and buffers ``spaces``, the namespaces of modules, have together."""

    spaces: tuple[Mapping[str, Any], ...]
    count: int

    @classmethod
    def of(cls, spaces: Iterable[Mapping[str, Any]]) -> Registered:
        """Return a guard of the number that there is now; Python's collector of garbage counts in a single call."""
        listed = tuple(spaces)
        return cls(listed, len(gc.get_referents(*listed)))

    def hold(self) -> bool:
        """Return whether there are as many now."""
        return len(gc.get_referents(*self.spaces)) == self.count

    def broken(self) -> list[str]:
        """Say that there are more or fewer."""
        return [] if self.hold() else ["the model has another number of parameters and buffers than it had"]


def pointer(x: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none that can be asked for."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return None


def same_values(now: Tensor, then: Tensor) -> bool:
    """Return whether two tensors have the same values, NaN included."""
    return SHIPPED.equal(now, then) or SHIPPED.allclose(now, then, rtol=0, atol=0, equal_nan=True)
