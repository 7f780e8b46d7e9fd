"""Explain a step that ran out of memory: the operator, its line in the module, and what was alive."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from linecache import getline
from types import FrameType, TracebackType

from torch import Tensor, fx

from ...core.annotations import facts, format_bytes, has_facts
from ...core.errors import RunError, Where
from .executor import Executor

NUM_NAMED_TENSORS = 5  # the largest ones
_REQUESTED_MEMORY = re.compile(r"[Tt]ried to allocate (?:([\d.]+ [KMGT]iB)|(\d+) bytes)")


@dataclass(frozen=True)
class _Place:
    """The place in a generated function where it was interrupted.

    Attributes:
        label: the function's name and stage.
        code: the line of generated code.
        node: the node that the line computes, if it is an operator's.
    """

    frame: FrameType
    label: str
    code: str
    node: fx.Node | None


def with_operator(error: BaseException, fault: RunError, executor: Executor, state: Mapping[str, Tensor]) -> RunError:
    """Return ``fault`` with the operator that ran out of memory, its line, and what was alive.

    Args:
        error: as it was raised: its traceback leads through the generated function.
        fault: the error to extend.
        executor: what ran the step.
        state: this rank's parts of parameters and buffers.
    """
    place = _place(error, executor)
    lines, where = [fault.message], fault.where
    if place is not None:
        request = _REQUESTED_MEMORY.search(str(error))
        amount = "" if request is None else f", which asked for {request[1] or format_bytes(int(request[2]))}"
        lines.append(f"in `{place.code}`, {place.label}, microbatch {executor.comm.microbatch}{amount}")
        if place.node is not None and has_facts(place.node):
            where = facts(place.node).where
    return RunError(fault.code, "\n  ".join([*lines, *_alive(executor, state, place)]), where=where, fix=fault.fix)


def _place(error: BaseException, executor: Executor) -> _Place | None:
    """Return the place in a generated function where the error's traceback passes, if there is one."""
    pieces = [(stage, label, piece) for stage in executor.part.stages for label, piece in stage.pieces.items()]
    codes = {
        getattr(type(piece.module).forward, "__code__", None): (f"{label} of stage {stage.index}", piece.module.graph)
        for stage, label, piece in pieces
    }
    for frame in _frames(error.__traceback__):
        if frame.f_code in codes:
            label, graph = codes[frame.f_code]
            code = getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip().partition(";  ")[0]
            name = code.partition(" = ")[0]
            return _Place(frame, label, code, next((node for node in graph.nodes if node.name == name), None))
    return None


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


@dataclass
class _LiveMemory:
    """Bytes of storages that are alive on a device; each storage is counted once, under its first name.

    Attributes:
        kinds: bytes by kind of tensor.
        tensors: (bytes, name and type) of each storage.
        storages: the addresses that were counted.
    """

    device: str
    kinds: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[int, str]] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)

    def add(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Count tensors, given with their names."""
        for name, x in named:
            storage = x.untyped_storage()
            num_bytes = storage.nbytes()
            if x.device.type != self.device or not num_bytes or storage.data_ptr() in self.storages:
                continue
            self.storages.add(storage.data_ptr())
            self.kinds[kind] = self.kinds.get(kind, 0) + num_bytes
            self.tensors.append((num_bytes, f"{name}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"))

    def lines(self) -> list[str]:
        """Return the text: sums by kind, and the largest tensors."""
        largest = sorted(self.tensors, key=lambda entry: -entry[0])[:NUM_NAMED_TENSORS]
        sums = ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in self.kinds.items())
        return [f"alive on this rank: {sums}", *(f"  {format_bytes(num_bytes)}: {name}" for num_bytes, name in largest)]


def _alive(executor: Executor, state: Mapping[str, Tensor], place: _Place | None) -> list[str]:
    """Return lines about the memory that the step holds: sums by kind, and the largest tensors."""
    sources = _sources(executor)
    memory = _LiveMemory(executor.device.type)
    memory.add("parameters and buffers", ((f"parameter or buffer {name}", x) for name, x in state.items()))
    if executor.gradients is not None:
        buckets = executor.gradients.buckets
        memory.add("gradients", ((f"gradients of {next(iter(b.views))}, ...", b.buffer) for b in buckets))
    for values in (*executor.whole.values(), *executor.carried.values()):
        memory.add("values of the whole step", ((_named(n, sources), x) for n, x in values.items()))
    for (_, index), values in executor.values.items():
        named = ((f"{_named(n, sources)}, of microbatch {index}", x) for n, x in values.items())
        memory.add("kept for backwards", named)
    if place is not None:
        tensors = ((n, x) for n, x in place.frame.f_locals.items() if isinstance(x, Tensor))
        memory.add("within this function", ((_named(n, sources), x) for n, x in tensors))
    return memory.lines()


def _sources(executor: Executor) -> dict[str, Where]:
    """Return the place in the user's source for each value, by its name."""
    graphs = [piece.module.graph for stage in executor.part.stages for piece in stage.pieces.values()]
    return {n.name: facts(n).where for graph in graphs for n in graph.nodes if has_facts(n) and n.op != "placeholder"}


def _named(name: str, sources: Mapping[str, Where]) -> str:
    where = sources.get(name)
    return f"%{name} ({where})" if where is not None and str(where) else f"%{name}"
