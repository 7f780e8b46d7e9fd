"""A segment's work on memory that stays, captured once and replayed with other values.

What a replay makes lies where it lay before. As torch's allocator does, a replay takes that memory again when nothing
refers to it any more: not as long as a microbatch in flight, a backward, a transfer or a user has some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .segments import Function


class Capture(Protocol):
    """Makes of ``work``, which reads and writes the same memory each time, what does it again."""

    @property
    def device(self) -> str:
        """The type of device that works."""
        ...

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(frozen=True)
class Buffers:
    """Memory for inputs of replays, for all of an engine: one replay is over when the next one begins. By layout, and
    how manieth of it among the inputs."""

    found: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def like(self, x: Tensor, taken: set[tuple[Any, ...]]) -> Tensor:
        """One that is not yet ``taken`` for this segment."""
        number, layout = 0, (x.dtype, x.shape, x.stride(), x.device)
        while (number, *layout) in taken:
            number += 1
        key = (number, *layout)
        taken.add(key)
        if key not in self.found:
            self.found[key] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return self.found[key]


@dataclass(frozen=True)
class View:
    """A result that is a view of the ``source``-th input, from ``offset`` on."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, args: Sequence[Tensor]) -> Tensor:
        x = args[self.source]
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


@dataclass(frozen=True)
class Captured:
    """``copied``: which inputs are copied to ``buffers``. ``made``: each result, or how it is seen in an input.
    ``memory``: what the results lie in, and ``idle`` how often each is referred to from here."""

    replay: Callable[[], None]
    copied: tuple[int, ...]
    buffers: list[Tensor]
    made: tuple[Tensor | View, ...]
    memory: tuple[torch.UntypedStorage, ...]
    idle: list[int]

    @classmethod
    def of(
        cls, kernel: Function, args: Sequence[Tensor], still: Mapping[int, int], buffers: Buffers, capture: Capture
    ) -> Captured:
        """``kernel`` on ``args``, whose results are there then. ``still``: the inputs that are read where they lie."""
        parts = _captured(kernel, args, still, buffers, capture)  # of whose own references none is left
        return cls(*parts, _uses(parts[-1]))

    @property
    def free(self) -> bool:
        """Whether nobody has what the last run made."""
        return _uses(self.memory) == self.idle

    def __call__(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The results for ``args``, of the same layout, whose ``still`` inputs lie where they did."""
        _copy(self.buffers, [_once(args[i]) for i in self.copied])
        self.replay()
        return self.results(args)

    def results(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Of the last run, which had these ``args``: new tensors, for whoever has one refers to the memory."""
        return [x.of(args) if isinstance(x, View) else x.detach() for x in self.made]


def _captured(
    kernel: Function, args: Sequence[Tensor], still: Mapping[int, int], buffers: Buffers, capture: Capture
) -> tuple[
    Callable[[], None], tuple[int, ...], list[Tensor], tuple[Tensor | View, ...], tuple[torch.UntypedStorage, ...]
]:
    taken: set[tuple[Any, ...]] = set()
    given = [x if i in still else buffers.like(x, taken) for i, x in enumerate(args)]
    copied = tuple(i for i in range(len(args)) if i not in still)
    entries = [_once(given[i]) for i in copied]
    _copy(entries, [_once(args[i]) for i in copied])
    results = kernel(list(given))
    inputs = {_home(x): i for i, x in enumerate(given) if x.numel()}
    made = tuple(_seen(x, given, inputs) for x in results)
    # no other device can have what depends on this one's values, unless the host waits for it, which no capture allows
    there = [i for i, x in enumerate(made) if isinstance(x, Tensor) and x.numel() and x.device.type == capture.device]
    homes = {_home(results[i]): i for i in there}
    whole = [_whole(results[i]) for i in homes.values()]

    def work() -> None:
        again = kernel(list(given))
        _copy(whole, [_whole(again[i]) for i in homes.values()])

    return capture(work), copied, entries, made, tuple(x.untyped_storage() for x in whole)


def _uses(memory: Sequence[torch.UntypedStorage]) -> list[int]:
    return [torch._C._storage_Use_Count(storage._cdata) for storage in memory]


def _home(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def addresses(args: Sequence[Tensor]) -> dict[int, int]:
    """By input; without those that share memory: which of them a result is a view of could not be told."""
    homes = [_home(x) for x in args]
    return {i: x.data_ptr() for i, x in enumerate(args) if homes.count(homes[i]) == 1}


def _seen(x: Tensor, given: Sequence[Tensor], inputs: Mapping[int, int]) -> Tensor | View:
    source = inputs.get(_home(x)) if x.numel() else None
    if source is None:
        return x
    if x.dtype is not given[source].dtype:
        raise NotImplementedError("it returns an input as another dtype")
    offset = int(x.storage_offset()) - int(given[source].storage_offset())
    return View(source, tuple(x.shape), x.stride(), offset)


def _whole(x: Tensor) -> Tensor:
    """All memory that ``x`` lies in: several results may share it, and one may repeat it."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def _once(x: Tensor) -> Tensor:
    """``x`` without repetitions: what is expanded is written once."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _copy(to: list[Tensor], xs: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, xs)
