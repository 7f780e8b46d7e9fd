"""The names of values that a stage reads, keeps and sends, prepared once so that a step only looks them up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from torch import Tensor

from ...ir.distributed_program import DistributedProgram, StageProgram

Reader = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class StageValues:
    """Names and readers of a stage's values.

    Attributes:
        state: names of the values that are parameters, buffers and constants.
        read_state: reads those from a rank's state.
        read_once: reads the arguments of the function that runs at the start of a step.
        read_static: for each function, reads the arguments that all microbatches share.
        kept: what lives on after a forward: saved for the backward, or still to be sent to other ranks.
        returned: gradients that a backward computes for other stages.
    """

    state: tuple[str, ...]
    read_state: Reader
    read_once: Reader
    read_static: Mapping[str, Reader]
    kept: Collection[str]
    returned: Collection[str]

    @classmethod
    def for_stage(cls, program: DistributedProgram, stage: StageProgram, own_stages: Collection[int]) -> StageValues:
        """Return the values of ``stage``, on a rank that runs ``own_stages``."""
        kept, returned = set(stage.saved), set[str]()
        for transfer in program.transfers:
            if transfer.source == stage.index and transfer.target not in own_stages:
                kept.update(transfer.forward)
            if transfer.target == stage.index:
                returned.update(transfer.backward)
        return cls(
            state=tuple(stage.state),
            read_state=reader(tuple(stage.state.values())),
            read_once=reader(stage.once.static),
            read_static={label: reader(piece.static) for label, piece in stage.pieces.items()},
            kept=kept,
            returned=returned,
        )


def reader(names: Sequence[str]) -> Reader:
    """Return ``tuple(values[name] for name in names)`` as a function of ``values`` without a Python loop."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)
