"""Which cases of a long sweep ``make test`` runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import combinations


def spread(cases: Sequence[tuple[str, ...]], count: int) -> list[int]:
    """Return the places of ``count`` of ``cases``, each the values of its parameters.

    Each next case is the one with the most values that no case before it has, then with the most pairs of values that
    none has, then the first. So every value, and then every pair, is met as soon as ``count`` allows.
    """
    values = [{(value,) for value in case} for case in cases]
    pairs = [set(combinations(case, 2)) for case in cases]
    chosen, met, remaining = list[int](), set[tuple[str, ...]](), list(range(len(cases)))
    while remaining and len(chosen) < count:
        gains = [(len(values[place] - met), len(pairs[place] - met)) for place in remaining]
        best = remaining.pop(gains.index(max(gains)))
        chosen.append(best)
        met |= values[best] | pairs[best]
    return chosen


def is_in_part(name: str, part: str) -> bool:
    """Return whether a file of tests is in ``part``, such as ``"2/3"``, the second of three. Each file is in one."""
    number, count = map(int, part.split("/"))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % count == number - 1
