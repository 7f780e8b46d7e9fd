"""What forward changes: buffers, parameters and attributes of a module are what a step made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from ...compat.torch import storage_key
from ...guards.call_attributes import CallAttribute
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


def remake(attributes: Sequence[CallAttribute]) -> None:
    """Make attributes as the module's forward does, of the parameters that it has now; without gradients. Where ranks
    have parts of a parameter, they have the same parts of what is made of it."""
    if attributes:
        with torch.no_grad(), implicit_replication():  # a mask is whole on each rank
            for attribute in attributes:
                if not any(x.is_meta for x in attribute.module.parameters(recurse=False)):  # no rank of its stage
                    attribute.hook(attribute.module, ())
