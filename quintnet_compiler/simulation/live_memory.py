"""Bytes of values while a function runs: those of its variables, and those that its messages hold meanwhile."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..compat.torch import TorchDispatchMode, pytree, storage_key


class LiveMemory:
    """The memory that is alive: in use by the code's variables (``use``, ``drop``), or held by a message under way.

    Attributes:
        own: memory of arguments, which is not the function's.
        dynamic: the part of it that is free after its last use.
        working: the most bytes that the function's own memory took at once.
        parts: the same, less what was freed of arguments, for each part of the function that ends where a gradient is
            added up, with the bytes at that end.
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
        """Note that a variable refers to each of ``xs``."""
        for x in xs:
            where = storage_key(x)
            self._see(where, x)
            self.uses[where] += 1

    def drop(self, where: int) -> None:
        """Note that a variable no longer refers to a piece of memory."""
        self.uses[where] -= 1
        self._free(where)

    def note(self, inside: int = 0) -> None:
        """Note the bytes of now; ``inside``: what an operator takes in addition."""
        self.working = max(self.working, self.fresh + inside)
        self._since = max(self._since, self.fresh + inside - self.released)

    def part(self) -> None:
        """End a part of the function."""
        now = self.fresh - self.released
        self.parts.append((max(self._since, now), now))
        self._since = now

    def communicate(
        self, call: Callable[..., Any], args: Sequence[Any], *, same: bool = False
    ) -> tuple[Any, list[int]]:
        """Return the result of ``call``, and its memory, which is in use until it is dropped.

        Tensors that it makes, and those of ``args``, are counted for as long as it, or its result, holds them.
        ``same``: it has to get these very objects, not aliases.
        """
        with _MadeMeanwhile(self):
            operands = tuple(args) if same else pytree.tree_map_only(Tensor, _alias, tuple(args))
            result = call(*operands)
            del operands
        memory = []
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and (end := self._ends.pop(id(x), None)) is not None:
                end.detach()
                memory.append(storage_key(x))
                self.uses[memory[-1]] += 1
                self.held[memory[-1]] -= 1
        return result, memory

    def note_message(self, x: Tensor) -> None:
        """Note that a message may hold ``x``."""
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
    """Return another object with the same memory: its end tells when a message lets go of an argument."""
    return x.detach()


class _MadeMeanwhile(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a memory of the results of operators."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(x, Tensor):
                self.memory.note_message(x)
        return results
