"""Group lines about tensors by pattern: ``layers.{0..11}.norm.weight`` is one line for twelve."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<![^.])([0-9]+)(?![^.])")  # a whole part of a dotted name

Numbers = tuple[frozenset[int], ...]


def by_pattern(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Join lines that say the same of tensors whose names differ in numbers only; no name is lost.

    ``lines``: pairs of a name and the text about it, in which the name may also be written with "_" for ".". The result
    is in the order of each group's first name.

    >>> by_pattern((name, f"{name} [8]") for name in ("a.0.w", "a.0.b", "a.1.w", "a.1.b", "a.2.w", "head"))
    ['a.{0..2}.w [8]', 'a.{0,1}.b [8]', 'head [8]']
    """
    groups: dict[tuple[str, int], list[tuple[int, Numbers]]] = {}
    for position, (name, line) in enumerate(lines):
        numbers = tuple(frozenset({int(n)}) for n in _NUMBER.findall(name)) if "." in name else ()
        pattern = _pattern(name, line) if numbers else line
        groups.setdefault((pattern, len(numbers)), []).append((position, numbers))
    joined: list[tuple[int, str]] = []
    for (pattern, count), members in groups.items():
        for slot in reversed(range(count)):
            members = _merged(members, slot)
        for position, numbers in members:
            line = pattern
            for slot, slot_numbers in enumerate(numbers):
                line = line.replace(f"\0{slot}\0", numbers_text(sorted(slot_numbers)))
            joined.append((position, line))
    return [line for _, line in sorted(joined)]


def numbers_text(numbers: Sequence[int]) -> str:
    """Format sorted numbers as a shell would: ``7``, ``{0,1}``, ``{0..11}``, ``{0..3,8,10}``."""
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
    """Return ``line`` with a mark in place of each number of ``name``."""
    slots = iter(range(len(name)))
    marked = _NUMBER.sub(lambda _: f"\0{next(slots)}\0", name)
    line = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", marked, line)
    return re.sub(rf"(?<=_){re.escape(name.replace('.', '_'))}(?!\w)", marked.replace(".", "_"), line)


def _merged(members: list[tuple[int, Numbers]], slot: int) -> list[tuple[int, Numbers]]:
    """Merge members whose numbers differ in ``slot`` only."""
    groups: dict[Numbers, list[tuple[int, Numbers]]] = {}
    for position, numbers in members:
        others = (*numbers[:slot], *numbers[slot + 1 :])
        groups.setdefault(others, []).append((position, numbers))
    merged = []
    for others, group in groups.items():
        union = frozenset[int]().union(*(numbers[slot] for _, numbers in group))
        merged.append((group[0][0], (*others[:slot], union, *others[slot:])))
    return merged
