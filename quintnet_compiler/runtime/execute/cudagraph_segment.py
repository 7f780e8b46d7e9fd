"""A segment's work on memory that stays, captured once and replayed with other values.

What a replay makes lies where it lay before. As torch's allocator does, a replay takes that memory again when nothing
refers to it any more: not as long as a microbatch in flight, a backward, a transfer or a user has some of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...compat.torch import foreach_copy_, storage_uses
from .segments import Function

Work = Callable[[list[Tensor]], None]  # on inputs that lie at the same addresses each time


class Capture(Protocol):
    """Makes of ``work`` on ``given`` what does the same again; it need not keep ``given`` alive."""

    @property
    def device(self) -> str:
        """The type of device that works."""
        ...

    def __call__(self, work: Work, given: list[Tensor]) -> Work: ...


@dataclass(frozen=True)
class Buffers:
    """Memory for inputs of replays, for all of an engine: one replay is over when the next one begins. By layout, and
    how manieth of it among the inputs."""

    found: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def free(self, x: Tensor, taken: Collection[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The name of one for ``x`` that is not ``taken``."""
        layout = (x.dtype, x.shape, x.stride(), x.device)
        name = next((number, *layout) for number in itertools.count() if (number, *layout) not in taken)
        if name not in self.found:
            self.found[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return name


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


class CudaGraphSegment:
    """``kernel`` on inputs laid out like ``args``, for which its results are there at once. When it runs again it is
    captured. Inputs that lie at the same address each time (parameters, results of other captures) are read there;
    others are copied. Where one that did not move lies elsewhere, the work is captured again."""

    def __init__(self, kernel: Function, args: Sequence[Tensor], buffers: Buffers, capture: Capture) -> None:
        self.kernel, self.buffers, self.capture = kernel, buffers, capture
        self.taken: dict[int, tuple[Any, ...]] = {}  # the buffer of an input
        self.still = {i: x.data_ptr() for i, x in enumerate(args)}
        self.replay: Work | None = None
        self._run(args)
        self.memory = [x.untyped_storage() for x in self.whole]
        self.idle = self._uses()

    def _run(self, args: Sequence[Tensor]) -> None:
        """``made``: each result, or how it is seen in an input; ``whole``: the memory of those that replays make."""
        homes = [_home(x) for x in args]
        # a result must not look like a view of another input than it is one of
        given = self._put(args, [i for i, home in enumerate(homes) if homes.count(home) > 1])
        results = self.kernel(list(given))
        inputs = {_home(x): i for i, x in enumerate(given) if x.numel()}
        self.made = [_seen(x, given, inputs) for x in results]
        # what depends on this device's values is on no other, unless the host waits for it, which cannot be captured
        device = self.capture.device
        there = [i for i, x in enumerate(self.made) if isinstance(x, Tensor) and x.numel() and x.device.type == device]
        self.homes = list({_home(results[i]): i for i in there}.values())
        self.whole = [_whole(results[i]) for i in self.homes]

    def _put(self, args: Sequence[Tensor], copied: Sequence[int]) -> list[Tensor]:
        """``args``, some of them in buffers."""
        given = list(args)
        for i in copied:
            if i not in self.taken:
                self.taken[i] = self.buffers.free(args[i], self.taken.values())
            given[i] = self.buffers.found[self.taken[i]]
        _copy([_once(given[i]) for i in copied], [_once(args[i]) for i in copied])
        return given

    def _work(self, given: list[Tensor]) -> None:
        again = self.kernel(list(given))
        _copy(self.whole, [_whole(again[i]) for i in self.homes])

    def _uses(self) -> list[int]:
        return storage_uses(self.memory)

    @property
    def free(self) -> bool:
        """Whether nobody has what the last run made."""
        return self._uses() == self.idle

    def __call__(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The results for other ``args`` of the same layout."""
        moved = [i for i, address in self.still.items() if args[i].data_ptr() != address]
        for i in moved:
            del self.still[i]
        given = self._put(args, [i for i in range(len(args)) if i not in self.still])
        if self.replay is None or moved:
            self.replay = self.capture(self._work, given)
        self.replay(given)
        return self.results(args)

    def results(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Of the last run, which had these ``args``: new tensors, for whoever has one refers to the memory."""
        return [x.of(args) if isinstance(x, View) else x.detach() for x in self.made]


def _home(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


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
        foreach_copy_(to, xs)
