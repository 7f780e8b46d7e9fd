"""simulation.engine on durations given by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import fx

from quintnet_compiler.schedules.kinds import one_f_one_b
from quintnet_compiler.schedules.schedule import Flow, chain, with_transfers
from quintnet_compiler.simulation.engine import Engine
from quintnet_compiler.simulation.faults import RankGroup
from quintnet_compiler.simulation.piece_parts import NodeTime, PieceParts, starts_collective
from quintnet_compiler.simulation.work import ActionWork, Given, WorkPart


def _ends(transfer: float, rows: list[RankGroup], cores: int | None = None) -> list[float]:
    schedule = with_transfers(one_f_one_b(2, 2), chain(2), hoist=0)
    lines = Engine(
        schedule, Flow.from_edges(chain(2), 2), rows, Given(1.0, 2.0, transfer_seconds=transfer, cores=cores)
    ).run_actions()
    return [line.spans[-1].end for line in lines]


TWO = [RankGroup(0, 0, 0), RankGroup(1, 1, 0)]


def test_parts_of_a_function() -> None:
    graph = fx.Graph()
    comm = graph.placeholder("comm")
    start = graph.call_method("start_all_reduce", (comm,))
    add = graph.call_method("accumulate", (comm,))
    wait = graph.call_method("wait", (comm, start))
    assert starts_collective(start) and not starts_collective(wait)
    ends: dict[fx.Node, int] = {}
    parts = PieceParts(True, ends)
    for time in (NodeTime(start, 1.0), NodeTime(add, 2.0), NodeTime(wait, 3.0, 4.0, "dp", start), NodeTime(add, 5.0)):
        parts.add_node(time)
    collective = WorkPart(4.0, "dp", "wait", ahead=2)
    assert parts.take_parts() == [WorkPart(1.0), WorkPart(2.0), WorkPart(3.0), collective, WorkPart(5.0)]
    assert ends == {add: 5}
    assert PieceParts(True, None).take_parts() == [WorkPart(0.0)]


def test_a_pipeline_of_two_microbatches() -> None:
    # rank 1: F0 at 1, B0 at 2, F1 at 4, B1 at 5 until 7; rank 0 gets the last gradient then
    assert _ends(0.0, TWO) == [9.0, 7.0]
    assert _ends(0.5, TWO)[0] > 9.0


def test_a_slow_rank_and_shared_cores() -> None:
    slow = [TWO[0], RankGroup(1, 1, 0, compute=2.0)]
    assert _ends(0.0, slow)[1] > _ends(0.0, TWO)[1]
    assert max(_ends(0.0, TWO, cores=1)) == pytest.approx(12.0)  # 2 x 2 x (1 + 2): one after the other
    assert max(_ends(0.0, TWO, cores=2)) == pytest.approx(9.0)


def test_a_collective_that_was_started_ahead_is_waited_for_in_part() -> None:
    work = ActionWork((WorkPart(2.0), WorkPart(3.0, "tp", "gather", ahead=1), WorkPart(1.0)))
    assert work.seconds == pytest.approx(2.0 + 1.0 + 1.0)
    (hidden,) = work.hidden
    assert (hidden.axis, hidden.name) == ("tp", "gather")
    assert work.scaled(2.0, {}).seconds == pytest.approx(4.0 + 2.0)  # computing hides all of it now


def test_an_action_takes_the_time_of_the_device_beside_the_host() -> None:
    """The host starts kernels while the device computes: much the longer of the two decides, also on a slow rank."""
    work = ActionWork((WorkPart(2.0), WorkPart(1.0, "tp", "gather")), host=30.0)
    assert work.device_seconds == 3.0 and work.seconds == pytest.approx(30.0, rel=1e-6)
    assert [part.seconds for part in work.waited] == [2.0, 1.0, pytest.approx(27.0)] and work.waited[-1].axis == ""
    assert work.scaled(3.0, {}).seconds == pytest.approx(90.0)
    assert work.scaled(1.0, {"tp": 298.0}).seconds == pytest.approx(300.0)
    assert replace(work, host=0.0).seconds == 3.0 and len(replace(work, host=0.0).waited) == 2
    assert replace(work, host=3.0).seconds == pytest.approx(3.0 * 2 ** (1 / 6))  # about the same: longer than either
