"""A rank that lives but does not come is named once another has waited for it for too long, whatever that waits in."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from quintnet_compiler.runtime.launch.disagreement import disagreement
from quintnet_compiler.runtime.launch.heartbeat import LOOK, MARGIN, PERIOD, VERDICT, CollectiveCall, Heartbeat
from quintnet_compiler.runtime.launch.rank_status import RankStatus, innermost, read_rows

PATIENCE = 1.25
IN_TIME = int(PATIENCE / (LOOK * PERIOD))  # looks within it
STACKS = """Thread 0x0000000000000001 (most recent call first):
  File "/a/threading.py", line 7 in wait
  File "/b/train.py", line 9 in main

Thread 0x0000000000000002 (most recent call first):
  File "/c/other.py", line 3 in run
"""


Wait = Callable[[threading.Lock], Any]


def _wait(lock: threading.Lock) -> None:
    lock.acquire()


class Waiting:
    """A thread at one line, until ``go_on`` is released: the main thread of a rank whose device is not ready.

    Args:
        wait: a function of one line.
    """

    def __init__(self, wait: Wait = _wait) -> None:
        self.go_on = threading.Lock()
        self.go_on.acquire()
        self.thread = threading.Thread(target=wait, args=(self.go_on,), daemon=True)
        self.thread.start()
        while not self._is_there(wait):
            time.sleep(0.01)

    def _is_there(self, wait: Wait) -> bool:
        return any(frame.f_code is wait.__code__ for frame in sys._current_frames().values())


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.go_on.release()


def _in_a_step(pulse: Heartbeat, number: int, thread: threading.Thread) -> None:
    assert thread.ident is not None
    pulse.main = thread.ident
    pulse.now = CollectiveCall(number, "step", "", (), number - 1, ("train.py", 37))
    pulse.inside, pulse.step = True, number - 1


@pytest.fixture
def ranks(tmp_path: Path, waiting: Waiting) -> list[Heartbeat]:
    """Rank 0 is in its fifth call; rank 1 in its own code, after its fourth. Nobody but the test looks at them."""
    store = HashStore()
    store.set(VERDICT, "")
    made = [Heartbeat(lambda: store, rank, 2, tmp_path, PATIENCE) for rank in range(2)]
    _in_a_step(made[0], 5, waiting.thread)
    made[1].now = CollectiveCall(4, "step", "", (), 3, ("train.py", 37))
    made[1].place, made[1].looked = (False, "data.py:20 in read"), 4
    made[1]._write()
    return made


def _look(pulse: Heartbeat, times: int) -> None:
    for _ in range(times):
        pulse._look()
    pulse._write()


def _rows(pulse: Heartbeat) -> dict[int, RankStatus]:
    return read_rows(pulse.store, range(2))


def test_the_innermost_line_of_a_thread() -> None:
    assert innermost(STACKS, 1) == '  File "/a/threading.py", line 7 in wait'
    assert innermost(STACKS, 2) == '  File "/c/other.py", line 3 in run'
    assert innermost(STACKS, 3) == ""


def test_a_rank_that_does_not_come_is_named_with_where_it_is(ranks: list[Heartbeat]) -> None:
    _look(ranks[0], 2 + IN_TIME)  # the first two see what call it is in, and at which line
    assert disagreement(_rows(ranks[0])) is None
    _look(ranks[0], 1)
    late = disagreement(_rows(ranks[0]))
    assert late is not None and late.ranks == (1,) and late.code == "QN402"
    assert late.text == (
        "rank 1 did not come to step 4 in time: rank 1 is at data.py:20 in read, after step 3 at train.py:37; "
        "rank 0 is in step 4 at train.py:37"
    )
    assert late.error.fix == "see what it does there, or wait longer for it"
    ranks[1].now = ranks[0].now  # it comes after all
    ranks[1]._write()
    assert disagreement(_rows(ranks[0])) is None


def test_ranks_in_one_long_call_do_not_give_each_other_up(ranks: list[Heartbeat], waiting: Waiting) -> None:
    _in_a_step(ranks[1], 5, waiting.thread)
    for pulse in ranks:
        _look(pulse, 10 * IN_TIME)
    assert [row.gave_up for row in _rows(ranks[0]).values()] == [True, True]
    assert disagreement(_rows(ranks[0])) is None


def test_a_rank_that_goes_from_line_to_line_does_not_wait(ranks: list[Heartbeat]) -> None:
    for _ in range(10 * IN_TIME):
        _look(ranks[0], 1)
        ranks[0].spot = "the line before"
    assert not ranks[0].gave_up


def test_outside_of_a_call_nobody_is_waited_for(ranks: list[Heartbeat]) -> None:
    ranks[0].inside = False
    _look(ranks[0], 10 * IN_TIME)
    assert not ranks[0].gave_up


def test_where_the_host_waits_the_error_of_the_transport_comes_first(ranks: list[Heartbeat], tmp_path: Path) -> None:
    code = compile("def wait(lock):\n    lock.acquire()\n", "/x/torch/distributed/work.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    made = Waiting(names["wait"])
    _in_a_step(ranks[0], 5, made.thread)
    _look(ranks[0], 3 + IN_TIME)
    assert ranks[0].place[0] and not ranks[0].gave_up
    _look(ranks[0], round(MARGIN / (LOOK * PERIOD)) + 1)
    assert ranks[0].gave_up
    made.go_on.release()


def test_without_a_launching_process_the_rank_that_waits_tells_all(ranks: list[Heartbeat]) -> None:
    """Also where the late rank is not one that the observer looks at."""
    ranks[0].observer = SimpleNamespace(look=lambda store: None)
    _look(ranks[0], 3 + IN_TIME)
    ranks[0]._beat()
    assert ranks[0].verdict.startswith("rank 1 did not come to step 4 in time")
    assert ranks[0].store.get(VERDICT).decode() == ranks[0].verdict
