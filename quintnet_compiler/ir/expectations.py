"""Expectations of prices: lengths of packed documents, and how many rows experts get. No program computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST_DOCUMENTS = 4096
Lengths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=2**40)], ...],
    BeforeValidator(lambda lengths: tuple(lengths) if isinstance(lengths, list) else lengths),
]


class Expectations(BaseModel):
    """Assumptions about batches of predictions, the planner, and the searches of a compilation.

    Attributes:
        documents: lengths of the documents of packed rows, in the order in which rows are filled with them, for
            attention whose mask has documents. Rows go on where the one before ended, and documents begin again behind
            the last one. Empty: a row is one document; :func:`quintnet.plan` and :func:`quintnet.estimate` read them
            from the batch.
        hot_rows: the share of rows that go to hot experts, where there are some. None: all experts get equally many.
        expert_imbalance: how many rows the rank with the busiest experts gets, over their average.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Lengths = Field(default=(), max_length=MOST_DOCUMENTS)
    hot_rows: float | None = Field(default=None, ge=0, le=1)
    expert_imbalance: float = Field(default=1.0, ge=1, le=2**20)


@dataclass(frozen=True)
class ExpertLoad:
    """Rows of a layer's busiest rank, relative to the average.

    Attributes:
        computed: all rows that its experts compute.
        sent: those that return to the ranks that sent them, itself included; rows of hot experts stay on their ranks.
    """

    computed: float = 1.0
    sent: float = 1.0

    @classmethod
    def expected(cls, expect: Expectations, hot: int, experts: int) -> ExpertLoad:
        """Build the load that ``expect`` says of a layer in which ``hot`` of ``experts`` are hot.

        >>> ExpertLoad.expected(Expectations(expert_imbalance=1.5), 2, 8)
        ExpertLoad(computed=1.5, sent=1.25)
        """
        stays = 0.0 if not hot else hot / experts if expect.hot_rows is None else expect.hot_rows
        return cls(expect.expert_imbalance, expect.expert_imbalance - stays)
