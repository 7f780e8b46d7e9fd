"""Find repetitions in a list of labels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def longest_repetition(labels: Sequence[Hashable], at: int) -> tuple[int, int]:
    """Return the period and count of the repetition from ``at`` that saves most if only three units remain.

    (1, 1) if nothing repeats more than three times.

    >>> longest_repetition("ABABABABABC", 0)
    (2, 5)
    """
    best, saved = (1, 1), 0
    for period in range(1, (len(labels) - at) // 4 + 1):
        unit, times = labels[at : at + period], 1
        while labels[at + times * period : at + (times + 1) * period] == unit:
            times += 1
        if (times - 3) * period > saved:
            best, saved = (period, times), (times - 3) * period
    return best
