"""Expected numbers of rows of the experts of a rank, by which predictions and searches multiply prices."""

from __future__ import annotations

from dataclasses import dataclass


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
    def of(cls, imbalance: float, hot_rows: float | None, hot: int, experts: int) -> ExpertLoad:
        """Build the load from ``imbalance`` and ``hot_rows`` of :class:`.plan.Plan`; ``hot`` of ``experts`` are hot.

        >>> ExpertLoad.of(1.5, None, 2, 8)
        ExpertLoad(computed=1.5, sent=1.25)
        """
        stays = 0.0 if not hot else hot / experts if hot_rows is None else hot_rows
        return cls(imbalance, imbalance - stays)
