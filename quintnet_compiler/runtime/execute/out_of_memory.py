"""A step that ran out of memory: in which operator, on which line of the module, and what was alive then."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from linecache import getline
from types import FrameType, TracebackType

from torch import Tensor, fx

from ...core.annotations import facts, known, size
from ...core.errors import RunError, Where
from .executor import Executor

LARGEST = 5  # tensors that the text names
_ASKED = re.compile(r"[Tt]ried to allocate (?:([\d.]+ [KMGT]iB)|(\d+) bytes)")


@dataclass(frozen=True)
class _Place:
    """A generated function that was interrupted. ``label``: what the function is; ``code``: the line that it was in;
    ``node``: what that line computes, if it is one operator's."""

    frame: FrameType
    label: str
    code: str
    node: fx.Node | None


def with_operator(error: BaseException, fault: RunError, executor: Executor, state: Mapping[str, Tensor]) -> RunError:
    """``fault``, which says that there is no memory left, with the operator, its line, and what was alive.

    Args:
        error: as it was raised: its traceback leads through the generated function.
        state: this rank's parts of parameters and buffers.
    """
    place = _place(error, executor)
    lines, where = [fault.message], fault.where
    if place is not None:
        asked = _ASKED.search(str(error))
        more = "" if asked is None else f", which asked for {asked[1] or size(int(asked[2]))}"
        lines.append(f"in `{place.code}`, {place.label}, microbatch {executor.comm.microbatch}{more}")
        if place.node is not None and known(place.node):
            where = facts(place.node).where
    return RunError(fault.code, "\n  ".join([*lines, *_alive(executor, state, place)]), where=where, fix=fault.fix)


def _place(error: BaseException, executor: Executor) -> _Place | None:
    """The generated function that raised the error, found in the traceback."""
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


def _alive(executor: Executor, state: Mapping[str, Tensor], place: _Place | None) -> list[str]:
    """What the step held: sums by kind, and the largest tensors. Memory that tensors share is counted once."""
    seen: set[int] = set()
    kinds: dict[str, int] = {}
    found: list[tuple[int, str]] = []

    def add(kind: str, named: Iterator[tuple[str, Tensor]]) -> None:
        for name, x in named:
            storage = x.untyped_storage()
            if x.device.type != executor.device.type or not storage.nbytes() or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            kinds[kind] = kinds.get(kind, 0) + storage.nbytes()
            found.append((storage.nbytes(), f"{name}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"))

    sources = _sources(executor)
    add("parameters and buffers", ((f"parameter or buffer {name}", x) for name, x in state.items()))
    if executor.gradients is not None:
        add("gradients", ((f"gradients of {next(iter(b.views))}, ...", b.buffer) for b in executor.gradients.buckets))
    of_step = [values for held in (executor.whole, executor.carried) for values in held.values()]
    add("values of the whole step", ((_named(n, sources), x) for values in of_step for n, x in values.items()))
    kept = [(index, n, x) for (_, index), values in executor.values.items() for n, x in values.items()]
    add("kept for backwards", ((f"{_named(n, sources)}, of microbatch {index}", x) for index, n, x in kept))
    if place is not None:
        here = {n: x for n, x in place.frame.f_locals.items() if isinstance(x, Tensor)}
        add("within this function", ((_named(n, sources), x) for n, x in here.items()))
    largest = sorted(found, key=lambda one: -one[0])[:LARGEST]
    sums = ", ".join(f"{kind} {size(count)}" for kind, count in kinds.items())
    return [f"alive on this rank: {sums}", *(f"  {size(count)}: {name}" for count, name in largest)]


def _sources(executor: Executor) -> dict[str, Where]:
    """Where values come from, by name."""
    graphs = [piece.module.graph for stage in executor.part.stages for piece in stage.pieces.values()]
    return {n.name: facts(n).where for graph in graphs for n in graph.nodes if known(n) and n.op != "placeholder"}


def _named(name: str, sources: Mapping[str, Where]) -> str:
    where = sources.get(name)
    return f"%{name} ({where})" if where is not None and str(where) else f"%{name}"
