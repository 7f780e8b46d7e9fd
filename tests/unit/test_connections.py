"""No schedule can hang on NCCL: each way between two ranks has its own communicator, made before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.runtime.transport.connections import Connection, connections_of
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import (
    Schedule,
    ScheduleError,
    StageEdge,
    chain,
    with_transfers,
)

from ..communicators import MODES, stuck

STAGES = {"interleaved": (2, 3), "zb-v": (2,), "dualpipe-v": (2,)}  # of each rank; one where nothing is said


def _schedules(name: str, skips: bool) -> Iterator[Schedule]:
    for ranks in (2, 3, 4, 8):
        for microbatches in sorted({1, 2, ranks, ranks + 1, 2 * ranks, 3 * ranks}):
            for stages in STAGES.get(name, (1,)):
                try:
                    made = SCHEDULES[name](ranks, microbatches, stages)
                except ScheduleError:  # there is none of these numbers
                    continue
                edges = (*chain(made.num_stages), *([StageEdge(0, made.num_stages - 1)] if skips else []))
                yield with_transfers(made, edges)


@pytest.mark.parametrize("waits", [False, True], ids=["host runs ahead", "host waits"])
@pytest.mark.parametrize("skips", [False, True], ids=["chain", "skip edge"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs(name: str, skips: bool, waits: bool) -> None:
    found = list(_schedules(name, skips))
    assert len(found) >= 15
    for schedule in found:
        where = f"{len(schedule.actions)} ranks, {schedule.num_microbatches} microbatches"
        assert stuck(schedule, MODES["links"], waits=waits) == [], where


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["links at first use", "channels"])
def test_the_model_knows_what_hangs(mode: str) -> None:
    """What was done before: the default, one microbatch, met at first use; shared channels crossed."""
    made = (schedule for name in SCHEDULES for schedule in _schedules(name, skips=mode == "channels"))
    assert {"1f1b", "gpipe"} <= {schedule.name for schedule in made if stuck(schedule, MODES[mode], waits=False)}


def test_links_are_what_ranks_send_over() -> None:
    schedule = with_transfers(SCHEDULES["interleaved"](2, 2, 2), chain(4))
    found = connections_of(schedule, Mesh(pp=2, dp=2))
    assert found == sorted(found)
    assert Connection(0, 2, 0) in found and Connection(1, 0, 2) in found  # from the last rank to the first, and back
    assert {(link.source % 2, link.target % 2) for link in found} == {(0, 0), (1, 1)}
