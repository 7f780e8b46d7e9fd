"""Recorded operators, and values from them: those of the code that was recorded, bit by bit, with about one parameter
in memory at a time.

Whatever draws random numbers is run, in its order, so that the generator goes through the same states as in the
recorded code; of all else, only what wanted values are computed from. Memory is made when a call first needs it, and
freed after the last one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat.torch import pytree
from ..core.errors import CompileError


@dataclass(frozen=True)
class MemoryPlace:
    """A tensor's place: which memory, and which of its elements."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Call:
    """One operator, or a function that is run as one. ``args`` and ``kwargs`` have a :class:`MemoryPlace` for each
    tensor, and all else as it is.

    ``reads``, ``writes``: memory of its arguments; ``overwrites``: the part of ``writes`` of which nothing is left.
    ``results``: what it makes in memory of its own. ``draws``: whether it takes random numbers. ``default_dtype``: of
    numbers without a dtype at that time.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    results: tuple[MemoryPlace | None, ...]
    draws: bool
    default_dtype: torch.dtype

    @property
    def made(self) -> frozenset[int]:
        """The memory of its results."""
        return frozenset(place.memory for place in self.results if place is not None)


@dataclass(frozen=True)
class ReplayedCall:
    """A call to run, which wanted memory is ``complete`` after it, and which nobody needs any more."""

    call: Call
    complete: frozenset[int]
    freed: frozenset[int]


@dataclass(frozen=True)
class Tape:
    """Calls in their order. ``sizes``: bytes of each memory."""

    calls: list[Call] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def values(self, wanted: Mapping[str, MemoryPlace], seed: int) -> Iterator[tuple[str, Tensor]]:
        """The values of these places, each once it is complete, as ``torch.manual_seed(seed)`` and the recorded code
        give them on the CPU. While this runs, torch's generator has the states of that code; afterwards the one that
        it had.
        """
        steps, _ = needed(self.calls, {place.memory for place in wanted.values()})
        names: dict[int, list[str]] = {}
        for name, place in wanted.items():
            names.setdefault(place.memory, []).append(name)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for memory, storage in self._run(steps):
                for name in names[memory]:
                    yield name, wanted[name].of(storage)

    def unknown(self, memories: Iterable[int]) -> set[int]:
        """Memory that is read before anything is written to it, where these are wanted."""
        return needed(self.calls, memories, all_draws=False)[1]

    def read_number(self, place: MemoryPlace) -> Any:
        """A number that recorded code asks for.

        Raises:
            CompileError: QN604 if it depends on random numbers, or on values that are not there.
        """
        steps, unknown = needed(self.calls, {place.memory}, all_draws=False)
        if unknown or any(step.call.draws for step in steps):
            refuse_initialisation("the code that initialises the module reads a number that depends on random values")
        with torch.no_grad():
            ((_, storage),) = self._run(steps)
            return place.of(storage).item()

    def _run(self, steps: Sequence[ReplayedCall]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Run calls; give each wanted memory when it is complete."""
        memories: dict[int, torch.UntypedStorage] = {}

        def real(x: Any) -> Any:
            if isinstance(x, MemoryPlace):
                if x.memory not in memories:
                    memories[x.memory] = _memory(self.sizes[x.memory])
                return x.of(memories[x.memory])
            if isinstance(x, torch.device):
                return torch.device("cpu")
            return x.clone() if isinstance(x, Tensor) else x

        usual = torch.get_default_dtype()
        for step in steps:
            args, kwargs = pytree.tree_map(real, (step.call.args, dict(step.call.kwargs)))
            torch.set_default_dtype(step.call.default_dtype)
            try:
                out = step.call.function(*args, **kwargs)
            finally:
                torch.set_default_dtype(usual)
            results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            for place, x in zip(step.call.results, results, strict=True):
                if place is not None:
                    memories[place.memory] = _laid_out(x, place, self.sizes[place.memory])
            del args, kwargs, out, results
            for memory in step.freed:
                storage = memories.pop(memory)
                if memory in step.complete:
                    yield memory, storage


def needed(
    calls: Sequence[Call], wanted: Iterable[int], *, all_draws: bool = True
) -> tuple[list[ReplayedCall], set[int]]:
    """Return the calls to run for these memories' values, in order, and the memories that are read before written.

    ``all_draws``: also those that only take random numbers.
    """
    live, steps = set(wanted), []
    missing = set(live)  # wanted, and no call seen yet that uses it
    for call in reversed(calls):
        created, after = call.made, frozenset(live)
        used = created | call.reads | call.writes
        if (created | call.writes) & live:
            live = (live - created - call.overwrites) | call.reads | (call.writes - call.overwrites)
        elif call.draws and all_draws:  # what it writes is not needed, the numbers it takes are
            live = (live - created) | call.reads
        else:
            continue
        complete = frozenset(used & missing & after)
        missing -= complete
        steps.append(ReplayedCall(call, complete, frozenset(used - after) | complete))
    return steps[::-1], live


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _laid_out(x: Tensor, place: MemoryPlace, size: int) -> torch.UntypedStorage:
    """Return the memory of a result, with the strides that the recorded code saw."""
    assert x.dtype == place.dtype and tuple(x.shape) == place.size, f"{place} was recorded, not {x.shape} {x.dtype}"
    memory = x.untyped_storage()
    if (tuple(x.stride()), x.storage_offset(), memory.nbytes()) == (place.stride, place.offset, size):
        return memory
    storage = _memory(size)
    place.of(storage).copy_(x)
    return storage


def refuse_initialisation(message: str, fix: str = "") -> NoReturn:
    """Raises: CompileError QN604."""
    raise CompileError("QN604", message, fix=fix or "give values by name: program.initialize({name: f}) with f(tensor)")
