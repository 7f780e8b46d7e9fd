"""Ranks that do not meet: they are in different calls, one of them has finished, or one is too late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import RunError
from .rank_status import RankStatus, some_ranks

FIXES = {
    "QN401": "make the same calls in the same order on every rank: take this one out of the `if` that only some ranks "
    "enter (save_pretrained writes on rank 0 alone, save on each rank its part)",
    "QN402": "give every rank the same number of batches",
}
LATE = "see what it does there, or wait longer for it"


@dataclass(frozen=True)
class Disagreement:
    """Calls of ranks that can never meet.

    ``ranks``: those that are elsewhere than most; ``fix``: if it is not the code's.
    """

    code: str
    text: str
    ranks: tuple[int, ...]
    fix: str = ""

    @property
    def error(self) -> RunError:
        return RunError(self.code, self.text, fix=self.fix or FIXES[self.code])


def disagreement(rows: Mapping[int, RankStatus]) -> Disagreement | None:
    """Return the proof that ranks wait for each other in vain, if there is one.

    Each rank counts its calls, so calls of one number must be of one kind; and a rank that has finished makes no
    further one. That a rank is late is no disagreement, until another one has given up.
    """
    for number in sorted({row.calls for row in rows.values()} - {0}):
        callers = {rank: row for rank, row in rows.items() if row.calls == number}
        if len({row.kind for row in callers.values()}) > 1:
            return Disagreement("QN401", said_of(callers), _odd(callers))
    waiting = {rank: row for rank, row in rows.items() if row.inside}
    gone = {rank: row for rank, row in rows.items() if row.finished}
    if waiting and gone and max(row.calls for row in waiting.values()) > min(row.calls for row in gone.values()):
        return Disagreement("QN402", f"{said_of(gone)}; {said_of(waiting)}", tuple(gone))
    return _given_up_on({rank: row for rank, row in waiting.items() if row.gave_up}, rows)


def _given_up_on(waiting: Mapping[int, RankStatus], rows: Mapping[int, RankStatus]) -> Disagreement | None:
    """Those that have not begun a call in which another rank has waited for too long."""
    number = max((row.calls for row in waiting.values()), default=0)
    late = {rank: row for rank, row in rows.items() if row.calls < number}
    if not late:
        return None
    call = next(row.name for row in waiting.values() if row.calls == number)
    text = f"{some_ranks(list(late))} did not come to {call} in time: {said_of(late)}; {said_of(waiting)}"
    return Disagreement("QN402", text, tuple(late), LATE)


def stalled(rows: Mapping[int, RankStatus]) -> str:
    """Return the states of ranks, if all wait in communication, some in a call and others in the user's own; else "".

    Such as ``torch.distributed.barrier()``: they may wait for each other, if that lasts.
    """
    waits = all(row.waiting for row in rows.values())
    return said_of(rows) if waits and len({row.inside for row in rows.values()}) > 1 else ""


def said_of(rows: Mapping[int, RankStatus]) -> str:
    """Return the state of each rank: its call, or its last one; ranks in one state are in one phrase."""
    states: dict[tuple[str, str], list[int]] = {}
    for rank, row in sorted(rows.items()):
        states.setdefault(_state(row), []).append(rank)
    return ", ".join(
        f"{some_ranks(ranks)} {verb if len(ranks) == 1 else PLURAL[verb]} {name}".rstrip()
        for (verb, name), ranks in states.items()
    )


PLURAL = {"is in": "are in", "has left": "have left", "has finished": "have finished", "is at": "are at"}


def _state(row: RankStatus) -> tuple[str, str]:
    call = f"{row.name} at {row.line}" if row.line else row.name
    if row.finished:
        return "has finished", f"after step {row.step}" if row.step >= 0 else "before its first step"
    if row.inside:
        return "is in", call
    if row.at:
        return "is at", f"{row.at}, after {call}" if call else row.at
    return ("has left", call) if call else ("is at", "its start")


def _odd(rows: Mapping[int, RankStatus]) -> tuple[int, ...]:
    kinds = [row.kind for row in rows.values()]
    usual = max(dict.fromkeys(kinds), key=kinds.count)
    return tuple(rank for rank, row in rows.items() if row.kind != usual)
