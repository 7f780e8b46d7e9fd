"""Buffers and parameters that forward changes: what a step made of them becomes the module's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...compat.torch import storage_key
from ...ir.distributed_program import DistributedProgram


def split_results(
    program: DistributedProgram, results: Sequence[Tensor], there: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What the module returns, and the new values of what it changes. ``there``: its whole buffers and constants, of
    which the end of a step may compute them."""
    own = program.last.start
    new = {program.results[position].path: results[position] for position in program.last}
    if (end := program.end) is not None:
        given = [*(there[name] for name in end.static), *(new.pop(name) for name in end.dynamic)]
        new |= zip(end.outputs, end.module.forward([None, *given]), strict=True)
    return list(results[:own]), new


def written(program: DistributedProgram, new: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the module has from now on: the tensors that it has ``there``, with new values, as forward changes them in
    place; other tensors where forward assigns others."""
    assigned = program.captured.assigned
    memory = {storage_key(there[name]) for name in new}
    # two of them may change places: nothing is written before all is read
    new = {
        name: x.to(there[name].dtype, copy=True) if name in assigned or storage_key(x) in memory else x
        for name, x in new.items()
    }
    return {name: x if name in assigned else there[name].copy_(x) for name, x in new.items()}
