"""Calls that all ranks make are announced, and two that can never meet are known for what they are."""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.core.errors import InputError, RunError
from quintnet_compiler.runtime.launch import heartbeat
from quintnet_compiler.runtime.launch.board import KEPT, Board
from quintnet_compiler.runtime.launch.calls import announced, collective, frequent, running, users_line
from quintnet_compiler.runtime.launch.disagreement import disagreement, said_of, stalled
from quintnet_compiler.runtime.launch.heartbeat import SAVED, SAVES, VERDICT, CollectiveCall, Heartbeat
from quintnet_compiler.runtime.launch.rank_status import (
    LONGEST_LINE,
    RankStatus,
    brief,
    read_rows,
    shorten_middle,
    some_ranks,
)


def test_the_later_rank_sees_that_the_earlier_one_is_in_another_call(tmp_path: Path) -> None:
    one, other, third = (Board(tmp_path, rank, 3) for rank in range(3))
    assert not one.enter(1, "step", 0) and not other.enter(1, "step", 0)
    assert not one.enter(2, "save", 0)  # nobody else is there yet
    assert other.enter(2, "step", 1)
    assert not third.enter(1, "step", 0) and third.enter(2, "step", 1)
    assert not one.enter(2 + KEPT, "step", 1) and not other.enter(2 + KEPT, "step", 1)


def _row(calls: int, kind: str = "step", line: str = "train.py:37", **more: bool) -> RankStatus:
    name = f"step {calls - 1}" if kind == "step" else kind
    return RankStatus(calls=calls, kind=kind, name=name, line=line, step=calls - 1, **{"inside": True, **more})


def test_ranks_in_different_calls_are_named_with_both_lines() -> None:
    found = disagreement({0: _row(5, "save", "train.py:41"), 1: _row(5), 2: _row(5)})
    assert found is not None and found.code == "QN401" and found.ranks == (0,)
    assert found.text == "rank 0 is in save at train.py:41, ranks 1, 2 are in step 4 at train.py:37"
    # a rank that has left its call has made it all the same
    left = disagreement({0: _row(5, "save", inside=False), 1: _row(5)})
    assert left is not None and left.text.startswith("rank 0 has left save at train.py:37")


def test_a_rank_that_finished_is_said_to_have_finished() -> None:
    gone = _row(13, inside=False, finished=True)
    found = disagreement({0: _row(14), 1: gone})
    assert found is not None and found.code == "QN402" and found.ranks == (1,)
    assert found.text == "rank 1 has finished after step 12; rank 0 is in step 13 at train.py:37"
    assert disagreement({0: _row(13), 1: gone}) is None  # the last step of both
    assert disagreement({0: _row(14, inside=False), 1: gone}) is None  # it does not wait for anybody


def test_late_ranks_do_not_disagree() -> None:
    assert disagreement({0: _row(5), 1: _row(4)}) is None
    assert disagreement({0: _row(5, "save"), 1: _row(4), 2: RankStatus()}) is None
    assert disagreement({rank: RankStatus() for rank in range(3)}) is None
    elsewhere = {0: _row(2, inside=False), 1: RankStatus(at="data.py:7 in read"), 2: RankStatus()}
    assert said_of(elsewhere) == (
        "rank 0 has left step 1 at train.py:37, rank 1 is at data.py:7 in read, rank 2 is at its start"
    )


def test_ranks_that_may_wait_in_vain() -> None:
    outside = RankStatus(calls=4, kind="step", name="step 3", step=3, waiting=True, at="train.py:41 in main")
    inside = replace(_row(5), waiting=True)
    assert stalled({0: outside, 1: inside}).startswith("rank 0 is at train.py:41 in main, after step 3, rank 1 is in")
    assert stalled({0: inside, 1: inside}) == "" and stalled({0: replace(outside, waiting=False), 1: inside}) == ""


def test_texts_that_are_too_long_for_a_store() -> None:
    assert shorten_middle("short", 10) == "short"
    long = shorten_middle("a" * 10**6 + "b", 100)
    assert len(long) < 160 and long.endswith("b") and "999901 characters left out" in long
    assert brief("x") == "x" and len(brief("y" * 10**6)) < LONGEST_LINE + 100
    middle = ["y" * 5000 + one + "y" * 5000 for one in "ab"]
    assert brief(middle[0]) != brief(middle[1])
    assert some_ranks([3]) == "rank 3" and some_ranks(range(10)).endswith("7 and 2 more")


class _Program:
    _turn = contextlib.nullcontext()

    _label = ""

    @collective
    def save(self, folder: str, *, step: int) -> str:
        """Its text."""
        return f"{folder} {step}"


def test_without_other_ranks_nothing_is_announced() -> None:
    assert _Program().save("a", step=3) == "a 3"
    assert list(inspect.signature(_Program.save).parameters) == ["self", "folder", "step"]
    assert _Program.save.__doc__ == "Its text."
    with announced("load"), frequent("clip_grad_norm"), running({}, 0, "train", False, lambda: 1 / 0):
        pass


def _begin(
    pulse: Heartbeat, kind: str, given: object = (), step: int | None = None, line: int = 0, *, usual: bool
) -> None:
    pulse.begin_call(CollectiveCall(pulse.now.number + 1, kind, "", given, step, ("train.py", line)), usual=usual)


@pytest.fixture
def pulses(tmp_path: Path) -> list[Heartbeat]:
    store = HashStore()
    for key, text in ((VERDICT, ""), ("0", "{}"), ("1", "{}")):
        store.set(key, text)
    return [Heartbeat(lambda: store, rank, 2, tmp_path, 1.0) for rank in range(2)]


def test_a_call_is_refused_where_another_rank_is_in_another_one(pulses: list[Heartbeat]) -> None:
    one, other = pulses
    with one:
        _begin(one, "step", (), 0, 37, usual=True)
        one.inside = True
        other.inside = True
        start = time.monotonic()
        with pytest.raises(RunError, match=r"rank 0 is in step 0 at train.py:37, rank 1 is in save at train.py:41"):
            _begin(other, "save", (), None, 41, usual=False)
        assert time.monotonic() - start < 1  # rank 0 said nothing by itself: its heartbeat did
        rows = read_rows(one.store, range(2))
        assert rows[1].name == "save" and rows[1].inside and rows[0].step == 0


def test_ranks_that_look_later_read_the_call_that_was_refused(pulses: list[Heartbeat]) -> None:
    """The error of the first rank ends its call, and the second rank's error names that call all the same."""
    first, second = pulses
    first.place = (True, "train.py:3 in main")  # where a look saw it, before the call
    _begin(second, "step", (), 0, 37, usual=True)
    second.inside = True
    second._write()
    with pytest.raises(RunError, match="QN401"), announced_by(first):
        _begin(first, "verify", (), None, 46, usual=False)
    first._write()
    with pytest.raises(RunError, match=r"rank 0 is in verify at train.py:46, rank 1 is in step 0 at train.py:37"):
        second._compare(second.now, 1.0)
    first.finish()
    assert not read_rows(first.store, range(2))[0].inside


@contextlib.contextmanager
def announced_by(pulse: Heartbeat) -> Iterator[None]:
    pulse.inside = True
    try:
        yield
    finally:
        pulse.inside = False


def test_a_frequent_call_of_the_same_kind_does_not_wait(pulses: list[Heartbeat]) -> None:
    one, other = pulses
    for pulse in (one, other):  # neither has a thread: nothing but the board is written
        _begin(pulse, "step", (), 0, 37, usual=True)
    assert json.loads(one.store.get("0")) == {}
    other._write()
    _begin(one, "step", (), 1, 37, usual=True)
    one.finish()
    with pytest.raises(RunError, match="rank 0 has finished after step 1; rank 1 is in step 2"):
        other.inside = True
        _begin(other, "step", (), 1, 37, usual=True)
        _begin(other, "step", (), 2, 37, usual=False)


def test_a_call_within_a_call_is_part_of_it(pulses: list[Heartbeat]) -> None:
    one, other = pulses
    _begin(other, "measure", "int", 0, 0, usual=True)
    other._write()
    with one:
        with running({}, 0, "train", False, lambda: 1, name="measure"), announced("save"), frequent("clip_grad_norm"):
            assert one.now.name == "measure" and one.now.number == 1 and one.inside
        assert not one.inside and one.now.line[0] == __file__
        _begin(other, "evaluate", 2, None, 0, usual=True)
        other._write()
        with pytest.raises(
            InputError, match=r"evaluate: ranks were given different .*\n  rank 1: 2\n  all others: one"
        ):
            _begin(one, "evaluate", "one", None, 0, usual=False)


def test_the_users_line_is_the_innermost_one() -> None:
    found = list(map(lambda _: users_line(), [0]))  # noqa: C417 -- a frame more
    assert found[0][0] == __file__ and found[0][1] > 100


def test_one_of_the_ranks_that_could_save_is_chosen(tmp_path: Path) -> None:
    store = HashStore()
    one, other = (Heartbeat(lambda: store, rank, 2, tmp_path, 1.0) for rank in range(2))
    store.set(SAVES, "1")  # by the launching process
    assert not one.chosen() and other.chosen() and other.saves
    assert all(row.offers for row in read_rows(store, range(2)).values())
    other.announce_checkpoint(7)
    assert store.get(SAVED) == b"7"
    watched = Heartbeat(lambda: store, 1, 2, tmp_path, 1.0, SimpleNamespace(look=lambda store: None))
    assert not watched.chosen()  # by its neighbours: no process sees to the end of all others


def test_nobody_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "GRACE", 0.1)
    assert not Heartbeat(HashStore, 0, 2, tmp_path, 1.0).chosen()


# what one rank may call alone, once a program is set up: nothing is communicated
ALONE = {
    "data_rank",
    "data_ranks",
    "close",
    "compile_seconds",
    "diff",
    "dump",
    "explain",
    "first",
    "get_rng_state",
    "kept_in_16_bits",
    "load_state_dict",
    "loss_fn",
    "loss_scale",
    "mesh",
    "latest_batch",
    "loss_total",
    "model_flops",
    "named_parameters",
    "on_preempt",
    "parameters",
    "passes",
    "plan",
    "prepare",
    "prove",
    "ranks",
    "require_measure",
    "require_parts",
    "rescue",
    "schedule",
    "seconds_compiling",
    "set_rng_state",
    "simulate",
    "state_dict",
    "unsplit",
    "visualize",
    "zero_grad",
}


def test_every_public_call_that_communicates_is_announced() -> None:
    """A new method of a program either is in ALONE, or is a call of all ranks."""
    for name in dir(CompiledProgram):
        if name in ALONE or (name.startswith("_") and name != "__call__"):
            continue
        method = getattr(CompiledProgram, name)
        code = inspect.getsource(method.fget if isinstance(method, property) else method)
        # each batch of a total of losses is one; methods that features give announce themselves
        ways = "@collective", "self._run(", "announced(", "frequent(", "self.loss_total()", "self._method("
        assert any(way in code for way in ways), f"{name}: do all ranks make this call together?"
    assert "announced(" in inspect.getsource(CompiledProgram.close)  # where there is something to take apart
