"""Lists of tensors by pattern: ``layers.{0..11}.norm.weight`` is one line for twelve."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^.])([0-9]+)(?![^.])")  # a whole part of a dotted name

Numbers = tuple[frozenset[int], ...]


def by_pattern(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Lines that say the same of tensors whose names differ in numbers alone, as one line: no name is lost.

    ``lines``: name -> what is said of it, where the name may also have "_" for "."; in the order of the first name.

    >>> by_pattern((name, f"{name} [8]") for name in ("a.0.w", "a.0.b", "a.1.w", "a.1.b", "a.2.w", "head"))
    ['a.{0..2}.w [8]', 'a.{0,1}.b [8]', 'head [8]']
    """
    groups: dict[tuple[str, int], list[tuple[int, Numbers]]] = {}
    for position, (name, line) in enumerate(lines):
        numbers = tuple(frozenset({int(n)}) for n in _NUMBER.findall(name)) if "." in name else ()
        pattern = _pattern(name, line) if numbers else line
        groups.setdefault((pattern, len(numbers)), []).append((position, numbers))
    found: list[tuple[int, str]] = []
    for (pattern, count), members in groups.items():
        for digit in reversed(range(count)):
            members = _merged(members, digit)
        for position, numbers in members:
            line = pattern
            for digit, several in enumerate(numbers):
                line = line.replace(f"\0{digit}\0", numbers_text(sorted(several)))
            found.append((position, line))
    return [line for _, line in sorted(found)]


def numbers_text(numbers: Sequence[int]) -> str:
    """``7``, ``{0,1}``, ``{0..11}``, ``{0..3,8,10}``: sorted numbers, as a shell would write them."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    text = ",".join(parts)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _pattern(name: str, line: str) -> str:
    """``line`` with a mark in place of each number of ``name``."""
    places = iter(range(len(name)))
    marked = _NUMBER.sub(lambda _: f"\0{next(places)}\0", name)
    line = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", marked, line)
    return re.sub(rf"(?<=_){re.escape(name.replace('.', '_'))}(?!\w)", marked.replace(".", "_"), line)


def _merged(members: list[tuple[int, Numbers]], digit: int) -> list[tuple[int, Numbers]]:
    """Those that differ in one number alone, as one."""
    same: dict[Numbers, list[tuple[int, Numbers]]] = {}
    for position, numbers in members:
        same.setdefault((*numbers[:digit], *numbers[digit + 1 :]), []).append((position, numbers))
    return [
        (several[0][0], (*key[:digit], frozenset().union(*(numbers[digit] for _, numbers in several)), *key[digit:]))
        for key, several in same.items()
    ]
