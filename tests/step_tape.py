"""A stand-in for CUDA graphs of whole steps, on CPUs: a tape of operators with the addresses that they read and write.

As with a graph, a replay runs no Python of the step: numbers that Python computed are those of the capture, what was
not captured is read and written at the address where it lay, and the host knows no value during a capture. What
a step computes on the way is shared with other graphs, so a replay ruins the values of all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quintnet_compiler.runtime.execute.gradient_calls import OPERATORS

T = TypeVar("T")
HANDED = {operator: name for name, operator in OPERATORS.items()}
READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__")  # of values, by the host


class Refused(RuntimeError):
    pass


def _refuse(*_: object, **__: object) -> None:
    raise Refused("operation not permitted when stream is capturing")


@contextlib.contextmanager
def _no_reads() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, _refuse))
        yield


def _at_address(x: Tensor) -> Tensor:
    """The same memory, to which nothing but its address refers."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return x.detach()
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass
class Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]  # that are new memory

    def repeat(self) -> None:
        new = [x for x in pytree.tree_leaves(self.func(*self.args, **self.kwargs)) if isinstance(x, Tensor)]
        if self.results:
            for mine, x in zip(self.results, new, strict=True):
                mine.copy_(x)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.own: dict[int, Tensor] = {}  # a tensor for each storage that was made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HANDED:  # Python, which calls operators
            with self:
                comm, values = vars(args[0])["gradients"]
                return getattr(comm, HANDED[func])(*args[1:-1], values[args[-1]])
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            _refuse()
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        read = {x.untyped_storage().data_ptr() for x in taken}
        addressed = pytree.tree_map(self._reference, (args, kwargs))
        results = func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
        new = [x for x in tensors if x.untyped_storage().data_ptr() not in read or not x.numel()]
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for x in new:
            self.own.setdefault(x.untyped_storage().data_ptr(), x)
        if writes or new:
            assert len(new) in (0, len(tensors)), f"{func} returns new memory and an input"
            self.calls.append(Call(func, *addressed, [] if writes else [x.detach() for x in new]))
        return results

    def _reference(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach() if x.untyped_storage().data_ptr() in self.own else _at_address(x)

    def ruin(self) -> None:
        for x in self.own.values():
            if x.numel():
                flat = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
                flat.fill_(math.nan if x.is_floating_point() else 1)


@dataclass
class Tape:
    """Captures steps of programs on CPUs."""

    device_kind: str = "cpu"
    tapes: list[Recorder] = field(default_factory=list)
    warmed: int = 0
    replayed: int = 0

    def warm_up(self, work: Callable[[], T]) -> T:
        self.warmed += 1
        return work()

    def capture_step(self, work: Callable[[], object]) -> Callable[[], None]:
        tape = Recorder()
        with _no_reads(), tape:
            work()
        tape.ruin()  # a capture computes nothing
        self.tapes.append(tape)

        def replay() -> None:
            self.replayed += 1
            for other in self.tapes:
                if other is not tape:
                    other.ruin()
            with torch.no_grad():
                for call in tape.calls:
                    call.repeat()

        return replay
