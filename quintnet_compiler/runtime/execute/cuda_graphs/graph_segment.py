"""A segment captured once as a CUDA graph, and replayed on static memory with other values.

A replay writes its results to the same addresses as the last one. As with torch's allocator, that memory is reused
only when nothing refers to it: no microbatch in flight, backward, transfer or user.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ....compat.torch import foreach_copy_, storage_uses
from ....compat.torch_codegen import SHIPPED
from ..segments import Function

Work = Callable[[list[Tensor]], None]  # reads inputs at the same addresses each time


class Capture(Protocol):
    """Captures work on tensors as a graph, for example :class:`.graphed_engine.CudaGraphs`."""

    @property
    def device(self) -> str:
        """Return the type of device that runs the work."""
        ...

    def __call__(self, work: Work, inputs: list[Tensor]) -> Work:
        """Return what repeats ``work`` on the memory of ``inputs``, which it need not keep alive."""
        ...


@dataclass(frozen=True)
class Buffers:
    """Static input buffers of replays, shared by an engine's segments because replays never run concurrently.

    Attributes:
        tensors: a buffer for each key: a number (inputs of equal layout need several) and the layout.
    """

    tensors: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def free(self, x: Tensor, taken: Collection[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the key of a buffer of ``x``'s layout that is not ``taken``; allocate it if needed."""
        layout = (x.dtype, x.shape, x.stride(), x.device)
        key = next((number, *layout) for number in itertools.count() if (number, *layout) not in taken)
        if key not in self.tensors:
            self.tensors[key] = SHIPPED.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return key


@dataclass(frozen=True)
class View:
    """A result that is a view of the ``source``-th input, ``offset`` elements after its start."""

    source: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, args: Sequence[Tensor]) -> Tensor:
        x = args[self.source]
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


class CudaGraphSegment:
    """A kernel on inputs of one layout: the constructor runs it on ``args``, the second call captures it.

    Inputs with the same address in every call (parameters, results of other captures) are read in place; others are
    copied to static buffers. When an input that was read in place has moved, it is copied from then on, and the
    kernel is captured again.

    Attributes:
        taken: the key of the buffer of each copied input, by index.
        in_place: the address of each input that is read in place, by index.
        outputs: each result of a replay, or how it views an input.
        homes: the index of a result for each memory that a replay writes.
        whole: that memory, each as one flat tensor.
    """

    def __init__(self, kernel: Function, args: Sequence[Tensor], buffers: Buffers, capture: Capture) -> None:
        self.kernel, self.buffers, self.capture = kernel, buffers, capture
        self.taken: dict[int, tuple[Any, ...]] = {}
        self.in_place = {i: x.data_ptr() for i, x in enumerate(args)}
        self.replay: Work | None = None
        self._run(args)
        self.memory = [x.untyped_storage() for x in self.whole]
        self.idle = self._uses()

    def _run(self, args: Sequence[Tensor]) -> None:
        """Run the kernel, and set ``outputs``, ``homes`` and ``whole`` from its results."""
        addresses = [_storage_address(x) for x in args]
        # copy inputs that share memory: a result must not be mistaken for a view of another input
        placed = self._put(args, [i for i, address in enumerate(addresses) if addresses.count(address) > 1])
        results = self.kernel(list(placed))
        inputs = {_storage_address(x): i for i, x in enumerate(placed) if x.numel()}
        self.outputs = [_as_view(x, placed, inputs) for x in results]
        # results on other devices do not depend on this device's values: that would need the host to wait, which
        # cannot be captured
        device = self.capture.device
        new = [i for i, x in enumerate(self.outputs) if isinstance(x, Tensor) and x.numel()]
        on_device = [i for i in new if results[i].device.type == device]
        self.homes = list({_storage_address(results[i]): i for i in on_device}.values())
        self.whole = [_whole(results[i]) for i in self.homes]

    def _put(self, args: Sequence[Tensor], copied: Sequence[int]) -> list[Tensor]:
        """Return ``args``, with those at the indices ``copied`` replaced by buffers with their values."""
        placed = list(args)
        for i in copied:
            if i not in self.taken:
                self.taken[i] = self.buffers.free(args[i], self.taken.values())
            placed[i] = self.buffers.tensors[self.taken[i]]
        _copy([unexpanded(placed[i]) for i in copied], [unexpanded(args[i]) for i in copied])
        return placed

    def _work(self, placed: list[Tensor]) -> None:
        """Run the kernel, and copy its results to ``whole``."""
        results = self.kernel(list(placed))
        _copy(self.whole, [_whole(results[i]) for i in self.homes])

    def _uses(self) -> list[int]:
        return storage_uses(self.memory)

    @property
    def free(self) -> bool:
        """Return whether nothing refers to the last run's results."""
        return self._uses() == self.idle

    def __call__(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Return the results for other ``args`` of the same layout."""
        moved = [i for i, address in self.in_place.items() if args[i].data_ptr() != address]
        for i in moved:
            del self.in_place[i]
        placed = self._put(args, [i for i in range(len(args)) if i not in self.in_place])
        if self.replay is None or moved:
            self.replay = self.capture(self._work, placed)
        self.replay(placed)
        return self.results(args)

    def results(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of the last run, on ``args``, as new tensors, whose lifetime ``free`` follows."""
        return [x.of(args) if isinstance(x, View) else x.detach() for x in self.outputs]


def _storage_address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _as_view(x: Tensor, placed: Sequence[Tensor], inputs: Mapping[int, int]) -> Tensor | View:
    """Return ``x``, or how it views one of ``placed``; ``inputs`` maps addresses to their indices."""
    source = inputs.get(_storage_address(x)) if x.numel() else None
    if source is None:
        return x
    if x.dtype is not placed[source].dtype:
        raise NotImplementedError("it returns an input as another dtype")
    offset = int(x.storage_offset()) - int(placed[source].storage_offset())
    return View(source, tuple(x.shape), x.stride(), offset)


def _whole(x: Tensor) -> Tensor:
    """Return the whole storage of ``x`` as one flat tensor: results may share a storage, or repeat elements of it."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def unexpanded(x: Tensor) -> Tensor:
    """Return ``x`` with expanded dims narrowed to one element, so that a copy writes each element once."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        foreach_copy_(targets, sources)
