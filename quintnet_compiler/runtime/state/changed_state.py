"""Buffers, parameters and attributes that forward changes: write a step's new values to the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication

from ...compat.torch import storage_key
from ...compat.torch_hooks import make_again
from ...guards.call_attributes import CallAttribute
from ...ir.distributed_program import DistributedProgram


def split_results(
    program: DistributedProgram, results: Sequence[Tensor], current: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Split a program's outputs into the module's outputs and the new values of its state.

    ``current``: the module's whole buffers and constants, from which the end of a step may compute new values.
    """
    num_outputs = program.last.start
    new = {program.results[position].path: results[position] for position in program.last}
    if (end := program.end) is not None:
        arguments = [*(current[name] for name in end.static), *(new.pop(name) for name in end.dynamic)]
        new |= zip(end.outputs, end.module.forward([None, *arguments]), strict=True)
    return list(results[:num_outputs]), new


def written_state(
    program: DistributedProgram, new: Mapping[str, Tensor], current: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the module's tensors after a step: the ``current`` ones, changed in place, or newly assigned ones."""
    assigned = program.captured.assigned
    memory = {storage_key(current[name]) for name in new}
    # copy values that lie in the module's memory before writing there: forward may swap two buffers
    new = {
        name: x.to(current[name].dtype, copy=True) if name in assigned or storage_key(x) in memory else x
        for name, x in new.items()
    }
    return {name: x if name in assigned else current[name].copy_(x) for name, x in new.items()}


def remake(attributes: Sequence[CallAttribute]) -> None:
    """Make attributes as the module's forward does, of the parameters that it has now; without gradients. Where ranks
    have parts of a parameter, they have the same parts of what is made of it."""
    if attributes:
        with torch.no_grad(), implicit_replication():  # a mask is whole on each rank
            for attribute in attributes:
                if not any(x.is_meta for x in attribute.module.parameters(recurse=False)):  # no rank of its stage
                    make_again(attribute.hook, attribute.module)
