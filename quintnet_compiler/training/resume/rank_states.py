"""The states of all ranks' data in one checkpoint, stored once if they are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import CheckpointError
from ...runtime.state.digests import together

TellAll = Callable[[str], Sequence[str]]


def gathered(mine: Mapping[str, Any], tell_all: TellAll) -> dict[str, Any]:
    """Return the states of all ranks. Every rank calls this at the same time.

    Args:
        mine: The state of this rank, as JSON.
        tell_all: Gives every rank's text to every rank.
    """
    text = json.dumps(mine)
    digests = tell_all(str(together(text)))
    if len(set(digests)) == 1:
        return {"states": [mine], "of": [0] * len(digests)}
    texts = tell_all(text)
    different = list(dict.fromkeys(texts))
    return {"states": [json.loads(state) for state in different], "of": [different.index(state) for state in texts]}


@dataclass(frozen=True)
class RowReader:
    """A reader of rows: process ``rank``, number ``data_rank`` of ``data_ranks`` that read different rows."""

    rank: int
    data_rank: int
    data_ranks: int


def choose_state(stored: Mapping[str, Any], reader: RowReader, *, any_ranks: bool) -> tuple[Mapping[str, Any], bool]:
    """Return the state from which ``reader`` resumes, and whether it is that of the same rows.

    Args:
        stored: The result of :func:`gathered`, with ``data_ranks``, and ``data_rank_of`` each rank.
        reader: This process.
        any_ranks: Whether the rows depend neither on the states nor on the number of ranks.

    Raises:
        CheckpointError: QN602 if each data rank read its own rows, and there are others now.
    """
    states, of = stored["states"], stored["of"]
    if stored["data_ranks"] == reader.data_ranks:
        alike = [rank for rank, number in enumerate(stored["data_rank_of"]) if number == reader.data_rank]
        if alike:
            return states[of[reader.rank if reader.rank in alike else alike[0]]], True
        return states[0], False
    unread = stored["batches"] == 0 and len(states) == 1 and states[0]["loader"] is None
    if not any_ranks and not unread:
        raise CheckpointError(
            "QN602",
            f"each of {stored['data_ranks']} data ranks read rows of its own, by a loader of its own, and there are "
            f"{reader.data_ranks} data ranks now: which rows were read is not known",
            fix=f"go on with {stored['data_ranks']} data ranks; with quintnet.BatchSampler, runs go on with any number",
        )
    return states[of[0]], False
