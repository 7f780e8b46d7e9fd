"""Cutting a line into intervals: dynamic programming over the places of the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def balanced_starts(seconds: Array, num_stages: int, weights: Array | None = None) -> list[int]:
    """Where intervals 1, 2, ... begin, see :func:`starts_by_prices`.

    ``seconds[i, j]``: the price of interval ``[i, j)``; infinite where it may not be. No interval is empty.
    ``weights``: how many times its price each interval counts, from first to last.

    >>> work = np.concatenate([[0.0], np.cumsum([1.0, 1.0, 4.0, 1.0])])
    >>> balanced_starts(work[None, :] - work[:, None], 2)
    [2]
    """
    return starts_by_prices([seconds] * num_stages if weights is None else [seconds * weight for weight in weights])


def starts_by_prices(prices: Sequence[Array]) -> list[int]:
    """Where intervals 1, 2, ... begin, so that the dearest is as cheap as it can be, and among such cuts the sum of
    squares is least (PipeDream, Narayanan et al. 2019). ``prices``: of each interval, from first to last, by where it
    begins and ends."""
    whole = {id(one): one.copy() for one in prices}
    for one in whole.values():
        one[np.tril_indices(len(one))] = np.inf
    found = [whole[id(one)] for one in prices]
    dearest, _ = _partition(found, np.maximum)
    fitting = {id(one): np.where(one <= dearest * (1 + 1e-9), one**2, np.inf) for one in found}
    _, ends = _partition([fitting[id(one)] for one in found], np.add)
    return ends[:-1]


def _partition(prices: Sequence[Array], join: np.ufunc) -> tuple[float, list[int]]:
    """The least ``join`` of the prices of consecutive intervals, each by its own, and where the intervals end."""
    count = len(prices[0]) - len(prices)  # of places where an interval can begin: none is empty
    best, choices = prices[0][0, 1 : count + 1], []
    for index, price in enumerate(prices[1:], 1):
        joined = join(best[:, None], price[index : index + count, index + 1 : index + 1 + count])
        choices.append(joined.argmin(axis=0))
        best = np.take_along_axis(joined, choices[-1][None, :], axis=0)[0]
    places = [count - 1]
    for chosen in reversed(choices):
        places.insert(0, int(chosen[places[0]]))
    return float(best[-1]), [index + place for index, place in enumerate(places, 1)]
