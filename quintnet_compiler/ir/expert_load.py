"""How many rows the experts of a rank are expected to get: what predictions and searches multiply prices by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoad:
    """Of a layer: rows of the rank that gets most of them, over their average.

    ``computed``: all that its experts compute. ``sent``: those of them that come from ranks, itself one of them, to
    which they have to return: rows of hot experts are their ranks' own.
    """

    computed: float = 1.0
    sent: float = 1.0

    @classmethod
    def of(cls, imbalance: float, hot_rows: float | None, hot: int, experts: int) -> ExpertLoad:
        """``imbalance`` and ``hot_rows``: see :class:`.plan.Plan`; ``hot``: how many of the ``experts`` are.

        >>> ExpertLoad.of(1.5, None, 2, 8)
        ExpertLoad(computed=1.5, sent=1.25)
        """
        stays = 0.0 if not hot else hot / experts if hot_rows is None else hot_rows
        return cls(imbalance, imbalance - stays)
