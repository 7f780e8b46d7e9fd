"""Everything that the compiler knows of one operator, apart from its sharding rule (:mod:`.rules`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .rules.notation import Work

FusedAs = Literal["pointwise", "reduction"]
FUSED: tuple[FusedAs, ...] = get_args(FusedAs)


@dataclass(frozen=True)
class OpSpec:
    """The facts of an operator. Passes, prices, checks and printers ask these instead of comparing operators.

    Attributes:
        work: what it is priced as; None where a rule or torch's tags say it (:func:`.rules.work.work_of`).
        autocast: the bits in which mixed precision computes it, 16 or 32; None: those of its inputs.
        keep: whether recomputing it takes longer than a few passes over memory.
        save: whether it is never recomputed, as it is small and the host may have to wait for it.
        fused_as: what compilers take it apart into and fuse, beyond what torch's tags say.
    """

    work: Work | None = None
    autocast: int | None = None
    keep: bool = False
    save: bool = False
    fused_as: FusedAs | None = None
