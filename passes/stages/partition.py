"""Cutting a line into intervals: dynamic programming over the places of the cuts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def balanced_starts(seconds: Array, num_stages: int) -> list[int]:
    """Where intervals 1, 2, ... begin, so that the dearest is as cheap as it can be, and among such cuts the sum of
    squares is least (PipeDream, Narayanan et al. 2019).

    ``seconds[i, j]``: the price of interval ``[i, j)``; infinite where it may not be. No interval is empty.

    >>> work = np.concatenate([[0.0], np.cumsum([1.0, 1.0, 4.0, 1.0])])
    >>> balanced_starts(work[None, :] - work[:, None], 2)
    [2]
    """
    seconds = seconds.copy()
    seconds[np.tril_indices(len(seconds))] = np.inf
    dearest, _ = _partition(seconds, num_stages, np.maximum)
    fitting = np.where(seconds <= dearest * (1 + 1e-9), seconds**2, np.inf)
    _, ends = _partition(fitting, num_stages, np.add)
    return ends[:-1]


def _partition(price: Array, num_stages: int, join: np.ufunc) -> tuple[float, list[int]]:
    """The least ``join`` of the prices of ``num_stages`` consecutive intervals, and where the intervals end."""
    best, choices = price[0], []
    for _ in range(num_stages - 1):
        joined = join(best[:, None], price)
        choices.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    ends = [len(price) - 1]
    for chosen in reversed(choices):
        ends.insert(0, int(chosen[ends[0]]))
    return float(best[-1]), ends
