"""Which rows of a batch the module itself is called with, where each microbatch is a batch of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..compat.torch import pytree
from ..ir.batch_form import batch_size_of
from ..ir.distributed_program import DistributedProgram


def batches_of(program: DistributedProgram, batch: Any) -> list[Any]:
    """The batches of which a step of ``program`` consists, in order: one, or its microbatches.

    Each data rank has a run of rows, and each microbatch a run of those of every data rank.
    """
    if program.batches == 1:
        return [batch]
    rows, ranks, count = batch_size_of(batch), program.mesh.data_ways, program.batches

    def own(x: Tensor, index: int) -> Tensor:
        if not x.dim() or x.shape[0] != rows:
            return x
        return x.reshape(ranks, count, rows // (ranks * count), *x.shape[1:])[:, index].flatten(0, 1)

    return [pytree.tree_map_only(Tensor, lambda x: own(x, index), batch) for index in range(count)]  # noqa: B023
