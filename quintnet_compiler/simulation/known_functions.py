"""Reuse of what functions did on fake tensors: their results look the same, in new memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.torch import storage_key
from ..core.annotations import facts

Peaks = tuple[int, tuple[tuple[int, int], ...]]  # see :class:`.footprint.FunctionMemory`


@dataclass(frozen=True)
class _Look:
    """The layout of a tensor; ``memory``: the number of its piece of memory."""

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
    """Functions that were run already.

    Attributes:
        known: results for all graphs of one mode.
        where: what results depend on besides the code and its arguments: the sizes of groups and a place among them.
        opaque: whether a method's results are read from the graph.
    """

    known: MutableMapping[Hashable, Any]
    where: Hashable
    opaque: Callable[[str], bool]

    def run_once(
        self, graph: fx.Graph, arguments: Sequence[Tensor], lent: Iterable[Tensor], away: Iterable[Tensor],
        device: torch.device | None,
        run: Callable[[], tuple[tuple[Tensor, ...], Peaks]],
    ) -> tuple[tuple[Tensor, ...], Peaks]:  # fmt: skip
        """Return the outputs and peaks of ``run``, without calling it if an equal function is known.

        Args:
            graph: the function.
            arguments: its arguments; a function is equal if these look the same too.
            lent: the arguments that the caller keeps.
            away: the arguments on the host.
            device: where the function runs.
            run: calls it.
        """
        numbers: dict[int, int] = {}
        retained, host = {storage_key(x) for x in lent}, {storage_key(x) for x in away}
        looks = tuple((_look(x, numbers), storage_key(x) in retained, storage_key(x) in host) for x in arguments)
        key = ("function", self.where, device, looks, tuple(self._steps(graph)))
        previous: _Results | None = self.known.get(key)
        if previous is not None:
            return tuple(_rebuild(previous.outputs, arguments, looks)), previous.peaks
        results, peaks = run()
        outputs = tuple(_look(x, numbers) for x in results)
        if _repeatable(outputs, [look for look, *_ in looks]):
            self.known[key] = _Results(outputs, peaks)
        return results, peaks

    def _steps(self, graph: fx.Graph) -> Iterator[Hashable]:
        """Yield the function's nodes without names.

        Sites of collectives, and the parameters to which gradients are added, change nothing.
        """
        numbers: dict[fx.Node, str] = {}
        for node in graph.nodes:
            method = node.op == "call_method"
            args = fx.map_arg(node.args[:-1] if method else node.args, numbers.__getitem__)
            target = "" if node.op in ("placeholder", "output") else node.target
            read = method and self.opaque(str(node.target).removeprefix("start_"))
            text = repr((args, fx.map_arg(node.kwargs, numbers.__getitem__)))
            yield node.op, target, text, _looks(node) if read else ()
            numbers[node] = f"%{len(numbers)}"


def _looks(node: fx.Node) -> Hashable:
    value = facts(node).value
    return tuple((tuple(x.shape), x.stride(), x.dtype) for x in ((value,) if isinstance(value, Tensor) else value))


def _look(x: Tensor, numbers: dict[int, int]) -> _Look:
    memory = numbers.setdefault(storage_key(x), len(numbers))
    return _Look(
        tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, memory, x.untyped_storage().nbytes(), x.device
    )


def _repeatable(outputs: Sequence[_Look], arguments: Sequence[_Look]) -> bool:
    """Return whether all values of each piece of memory have one dtype: only then strides describe their views."""
    dtypes: dict[int, torch.dtype] = {}
    return all(dtypes.setdefault(look.memory, look.dtype) == look.dtype for look in (*arguments, *outputs))


def _rebuild(
    outputs: Iterable[_Look], arguments: Sequence[Tensor], looks: Sequence[tuple[_Look, bool, bool]]
) -> Iterator[Tensor]:
    """Yield tensors that look like ``outputs``: arguments, views of these, or views of new memory."""
    whole: dict[int, Tensor] = {}
    same: Mapping[_Look, Tensor] = {look: x for (look, *_), x in zip(looks, arguments, strict=True)}
    for (look, *_), x in zip(looks, arguments, strict=True):
        whole.setdefault(look.memory, x)
    for look in outputs:
        if look in same:
            yield same[look]
            continue
        if look.memory not in whole:
            whole[look.memory] = torch.empty(look.bytes // look.dtype.itemsize, dtype=look.dtype, device=look.device)
        yield whole[look.memory].as_strided(look.shape, look.stride, look.offset)
