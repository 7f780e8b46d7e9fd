"""Cutting a line into intervals: dynamic programming over the places of the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def balanced_starts(seconds: Array, num_stages: int, weights: Array | None = None) -> list[int]:
    """Return where intervals 1, 2, ... begin, see :func:`starts_by_prices`.

    ``seconds[i, j]``: the price of interval ``[i, j)``; infinite if it is not allowed. No interval is empty.
    ``weights``: the factor of each interval's price, from first to last.

    >>> work = np.concatenate([[0.0], np.cumsum([1.0, 1.0, 4.0, 1.0])])
    >>> balanced_starts(work[None, :] - work[:, None], 2)
    [2]
    """
    return starts_by_prices([seconds] * num_stages if weights is None else [seconds * weight for weight in weights])


def starts_by_prices(prices: Sequence[Array]) -> list[int]:
    """Return where intervals 1, 2, ... begin, so that the highest price is as low as possible.

    Among such cuts, the sum of squares of prices is least (PipeDream, Narayanan et al. 2019). ``prices``: for each
    interval from first to last, its price by beginning and end.
    """
    copies = {id(price): price.copy() for price in prices}  # intervals may share an array
    for price in copies.values():
        price[np.tril_indices(len(price))] = np.inf
    allowed = [copies[id(price)] for price in prices]
    highest, _ = _partition(allowed, np.maximum)
    squares = {id(price): np.where(price <= highest * (1 + 1e-9), price**2, np.inf) for price in allowed}
    _, ends = _partition([squares[id(price)] for price in allowed], np.add)
    return ends[:-1]


def _partition(prices: Sequence[Array], join: np.ufunc) -> tuple[float, list[int]]:
    """Return the least ``join`` of the prices of consecutive intervals, and where the intervals end."""
    count = len(prices[0]) - len(prices)  # of places where an interval can end: none is empty
    best, choices = prices[0][0, 1 : count + 1], []
    for index, price in enumerate(prices[1:], 1):
        joined = join(best[:, None], price[index : index + count, index + 1 : index + 1 + count])
        choices.append(joined.argmin(axis=0))
        best = np.take_along_axis(joined, choices[-1][None, :], axis=0)[0]
    places = [count - 1]
    for chosen in reversed(choices):
        places.insert(0, int(chosen[places[0]]))
    return float(best[-1]), [index + place for index, place in enumerate(places, 1)]
