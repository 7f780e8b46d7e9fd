"""Bytes of values while a function runs: of those that its code holds, and of what its messages hold meanwhile."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..compat.torch import TorchDispatchMode, pytree, storage_key


class LiveMemory:
    """Which memory is alive: in use by the code's variables (``use``, ``drop``), or held by a message under way.

    ``own``: memory of arguments, which is not the function's; ``dynamic``: the part of it that is free after its last
    use. ``working``: the most that the function's own memory took at once; ``parts``: the same, less what was freed of
    arguments, of each part of the function that ends where a gradient is added up, and what there is then.
    """

    def __init__(self, own: Iterable[int], dynamic: Iterable[int]) -> None:
        self.own, self.dynamic = set(own), frozenset(dynamic)
        self.sizes: dict[int, int] = {}
        self.uses: dict[int, int] = defaultdict(int)
        self.held: dict[int, int] = defaultdict(int)
        self.fresh = self.released = self.working = 0
        self.parts: list[tuple[int, int]] = []
        self._since = 0  # the most since a gradient was added up
        self._ends: dict[int, weakref.finalize[Any, Any]] = {}  # by the identity of a tensor that a message holds

    def use(self, *xs: Tensor) -> None:
        """A variable has each of ``xs``."""
        for x in xs:
            where = storage_key(x)
            self._see(where, x)
            self.uses[where] += 1

    def drop(self, where: int) -> None:
        """A variable has it no more."""
        self.uses[where] -= 1
        self._free(where)

    def note(self, inside: int = 0) -> None:
        """The most may be now; ``inside``: what an operator takes beside."""
        self.working = max(self.working, self.fresh + inside)
        self._since = max(self._since, self.fresh + inside - self.released)

    def part(self) -> None:
        """A part of the function ends here."""
        now = self.fresh - self.released
        self.parts.append((max(self._since, now), now))
        self._since = now

    def communicate(
        self, call: Callable[..., Any], args: Sequence[Any], *, same: bool = False
    ) -> tuple[Any, list[int]]:
        """What ``call`` makes, and its memory, which is in use until it is dropped. Tensors that it makes, and those of
        ``args``, are counted for as long as it, or what it returns, holds them. ``same``: it has to see these very
        objects."""
        with _MadeMeanwhile(self):
            given = tuple(args) if same else pytree.tree_map_only(Tensor, _alias, tuple(args))
            made = call(*given)
            del given
        found = []
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor) and (end := self._ends.pop(id(x), None)) is not None:
                end.detach()
                found.append(storage_key(x))
                self.uses[found[-1]] += 1
                self.held[found[-1]] -= 1
        return made, found

    def hold(self, x: Tensor) -> None:
        """A message may hold ``x``."""
        where = storage_key(x)
        if id(x) in self._ends:
            return
        self._see(where, x)
        self.held[where] += 1
        self._ends[id(x)] = weakref.finalize(x, self._end, id(x), where)
        self.note()

    def _see(self, where: int, x: Tensor) -> None:
        if not self.uses[where] and not self.held[where] and where not in self.own:
            self.sizes[where] = x.untyped_storage().nbytes()
            self.fresh += self.sizes[where]
        if where in self.dynamic:
            self.sizes[where] = x.untyped_storage().nbytes()

    def _end(self, identity: int, where: int) -> None:
        del self._ends[identity]
        self.held[where] -= 1
        self._free(where)

    def _free(self, where: int) -> None:
        if self.uses[where] or self.held[where]:
            return
        if where in self.dynamic:
            self.released += self.sizes[where]
        elif where not in self.own:
            self.fresh -= self.sizes[where]


def _alias(x: Tensor) -> Tensor:
    """The same memory, as another object: its end tells when a message lets go of an argument."""
    return x.detach()


class _MadeMeanwhile(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a memory what operators make."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(x, Tensor):
                self.memory.hold(x)
        return made
