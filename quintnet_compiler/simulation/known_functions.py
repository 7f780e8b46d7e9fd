"""Functions that were run on fake tensors once need not be again: what they make looks the same, in new memory."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import storage_key
from ..core.annotations import facts

Peaks = tuple[int, tuple[tuple[int, int], ...]]  # see :class:`.footprint.FunctionMemory`


@dataclass(frozen=True)
class _Look:
    """A tensor, in a piece of memory that is known by a number."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    memory: int
    bytes: int
    device: torch.device


@dataclass(frozen=True)
class _Results:
    outputs: tuple[_Look, ...]
    peaks: Peaks


@dataclass(frozen=True)
class KnownFunctions:
    """``known``: for all graphs of one mode. ``where``: what results depend on beside the code and its arguments: the
    sizes of groups and a place among them. ``opaque``: methods whose results are read from the graph."""

    known: MutableMapping[Hashable, Any]
    where: Hashable
    opaque: Container[str]

    def run(
        self, graph: fx.Graph, given: Sequence[Tensor], lent: Iterable[Tensor], away: Iterable[Tensor],
        device: torch.device | None,
        run: Callable[[], tuple[tuple[Tensor, ...], Peaks]],
    ) -> tuple[tuple[Tensor, ...], Peaks]:  # fmt: skip
        """What ``run`` returns, for a function of ``given``, of which the caller keeps what is ``lent``, and what is
        ``away`` lies on the host: its outputs and peaks. Where a function that does the same with arguments that
        look the same is known, it is not run."""
        numbers: dict[int, int] = {}
        kept, host = {storage_key(x) for x in lent}, {storage_key(x) for x in away}
        looks = tuple((_look(x, numbers), storage_key(x) in kept, storage_key(x) in host) for x in given)
        key = ("function", self.where, device, looks, tuple(self._steps(graph)))
        found: _Results | None = self.known.get(key)
        if found is not None:
            return tuple(_again(found.outputs, given, looks)), found.peaks
        made, peaks = run()
        outputs = tuple(_look(x, numbers) for x in made)
        if _repeatable(outputs, [look for look, *_ in looks]):
            self.known[key] = _Results(outputs, peaks)
        return made, peaks

    def _steps(self, graph: fx.Graph) -> Iterator[Hashable]:
        """A function without names: sites of collectives, and parameters to which gradients are added, change
        nothing."""
        numbers: dict[fx.Node, str] = {}
        for node in graph.nodes:
            method = node.op == "call_method"
            args = fx.map_arg(node.args[:-1] if method else node.args, numbers.__getitem__)
            target = "" if node.op in ("placeholder", "output") else node.target
            read = method and str(node.target).removeprefix("start_") in self.opaque
            given = repr((args, fx.map_arg(node.kwargs, numbers.__getitem__)))
            yield node.op, target, given, _looks(node) if read else ()
            numbers[node] = f"%{len(numbers)}"


def _looks(node: fx.Node) -> Hashable:
    found = facts(node).value
    return tuple((tuple(x.shape), x.stride(), x.dtype) for x in ((found,) if isinstance(found, Tensor) else found))


def _look(x: Tensor, numbers: dict[int, int]) -> _Look:
    memory = numbers.setdefault(storage_key(x), len(numbers))
    return _Look(
        tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, memory, x.untyped_storage().nbytes(), x.device
    )


def _repeatable(outputs: Sequence[_Look], given: Sequence[_Look]) -> bool:
    """Whether all values of one piece of memory have one dtype: else none is a view of another by its strides."""
    dtypes: dict[int, torch.dtype] = {}
    return all(dtypes.setdefault(one.memory, one.dtype) == one.dtype for one in (*given, *outputs))


def _again(
    outputs: Iterable[_Look], given: Sequence[Tensor], looks: Sequence[tuple[_Look, bool, bool]]
) -> Iterator[Tensor]:
    whole: dict[int, Tensor] = {}
    same: Mapping[_Look, Tensor] = {look: x for (look, *_), x in zip(looks, given, strict=True)}
    for (look, *_), x in zip(looks, given, strict=True):
        whole.setdefault(look.memory, x)
    for look in outputs:
        if look in same:
            yield same[look]
            continue
        if look.memory not in whole:
            whole[look.memory] = torch.empty(look.bytes // look.dtype.itemsize, dtype=look.dtype, device=look.device)
        yield whole[look.memory].as_strided(look.shape, look.stride, look.offset)
