"""runtime.launch: what ranks say of themselves, and what is made of it when one fails. No process is started."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from quintnet_compiler.core.errors import CompileError, InputError, RunError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.runtime.execute import malloc
from quintnet_compiler.runtime.launch import board, faults, run_folder, sending, smoke, world
from quintnet_compiler.runtime.launch.faults import RankError, Scene, stopped
from quintnet_compiler.runtime.launch.forwarding import Forwarding
from quintnet_compiler.runtime.launch.inside_launcher import Neighbours, agree_on_attempt
from quintnet_compiler.runtime.launch.launch import Places
from quintnet_compiler.runtime.launch.preemption import Preempted
from quintnet_compiler.runtime.launch.rank_status import (
    RankStatus,
    described,
    differ,
    first_line,
    format_value,
    of_communication,
    place,
    read_rows,
    refusal,
)
from quintnet_compiler.runtime.transport import gloo_threads


@pytest.mark.parametrize("error", [EOFError("unexpected EOF"), ConnectionResetError(104, "Connection reset by peer")])
def test_a_fork_server_that_ends_is_named(error: Exception) -> None:
    message = r"QN307 (?s:.*)fork server, .* before it had started rank 1"
    with pytest.raises(RunError, match=message), sending.needs_fork_server(1):
        raise error


def test_malloc_gets_both_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda parameter, value: given.append((parameter, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    malloc.tune_malloc()
    assert given == [(-1, 2**30), (-3, 2**25)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # another C library
    malloc.tune_malloc()
    assert len(given) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="threads are named in /proc")
def test_gloo_threads_alone_are_batch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    over, told = threading.Event(), threading.Event()
    found: list[int] = []

    def wait() -> None:
        found.append(threading.get_native_id())
        Path(f"/proc/self/task/{found[0]}/comm").write_text(gloo_threads.NAME)
        told.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    told.wait()
    gloo_threads.lower_gloo_thread_priority()
    policies = os.sched_getscheduler(found[0]), os.sched_getscheduler(threading.get_native_id())
    over.set()
    thread.join()
    assert policies == (os.SCHED_BATCH, os.SCHED_OTHER)


def test_the_smallest_thing_that_ranks_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.add_(3.0))  # of ranks 0 and 1
    assert smoke.smoke() == 6.0
    assert "gloo" in smoke.backends()


def test_devices_of_programs() -> None:
    assert world.device_for(nn.Linear(1, 1), None) == (torch.device("cpu"), None)
    assert world.device_for(nn.Linear(1, 1, device="meta"), None) == (torch.device("cpu"), None)
    assert world.device_for(nn.Identity(), "meta") == (torch.device("meta"), None)
    if not torch.backends.mps.is_built():
        with pytest.raises(CompileError, match="was built without mps"):
            world.device_for(nn.Identity(), "mps")
    assert world.judges() and not world.many()


def test_a_mesh_that_the_launcher_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "started", lambda: SimpleNamespace(size=3, join=lambda: None))
    with pytest.raises(RunError, match="needs 2 ranks, and the world has 3"):
        world.enter_world(Mesh(dp=2))
    joined: list[bool] = []
    monkeypatch.setattr(world, "started", lambda: SimpleNamespace(size=2, join=lambda: joined.append(True)))
    world.enter_world(Mesh(dp=2))
    assert joined == [True]


# -- what ranks say


def test_rows_go_through_a_store() -> None:
    store = HashStore()
    store.set("1", json.dumps({"step": 3, "pid": 7, "host": "h"}))
    assert read_rows(store, [1]) == {1: RankStatus(step=3, pid=7, host="h")}


def test_ranks_that_were_given_something_else() -> None:
    rows = {0: RankStatus(calls=2, given="a"), 1: RankStatus(calls=2, given="b"), 2: RankStatus(calls=2, given="a")}
    assert differ(rows, 2) == ["rank 1: b", "all others: a"]
    assert differ(rows, 3) == [] and differ({0: rows[0], 2: rows[2]}, 2) == []
    assert "ranks were given different batches\n  rank 1: b" in str(refusal(rows, 2, "step 4"))
    rows[1] = RankStatus(calls=2, given="{batch: a, changes of the module: drop.p is 0.5 and was 0.1}")
    assert "step 4: modules of ranks were changed in different ways\n  rank 1" in str(refusal(rows, 2, "step 4"))
    assert refusal(rows, 3, "step 4") is None


def test_batches_as_people_read_them() -> None:
    batch = (torch.zeros(2, 3), {"mask": True, "n": 4}, ["x"])
    assert format_value(described(batch)) == "(float32[2, 3], {mask: True, n: int}, (x))"


def test_errors_of_communication() -> None:
    cause = RuntimeError("[/x/gloo/transport/tcp/pair.cc:598] Connection closed by peer. This is typically rank 1")
    outer = ValueError("later")
    outer.__cause__ = cause
    assert of_communication(outer) and of_communication(RunError("QN402", "")) and not of_communication(None)
    assert not of_communication(ValueError("3 is not 4")) and not of_communication(RunError("QN302", ""))
    assert first_line(cause) == "Connection closed by peer" and first_line(ValueError()) == "ValueError"


def test_the_users_line_in_a_stack() -> None:
    stacks = (
        f'Thread 0x0000000000000010 (most recent call first):\n  File "{dist.__file__}", line 5 in wait\n'
        f'  File "{world.__file__}", line 6 in f\n  File "/home/me/train.py", line 12 in main\n\n'
        'Thread 0x0000000000000011 (most recent call first):\n  File "/home/me/other.py", line 1 in g\n'
    )
    assert place(stacks, 0x10) == (True, "/home/me/train.py:12 in main")
    assert place(stacks, 0x11) == (False, "/home/me/other.py:1 in g") and place(stacks, 0x12) == (
        False,
        "",
    )


# -- what is sent


def test_functions_go_by_name_or_by_value() -> None:
    offset = 3
    assert sending.unpacked(sending.packed(_elsewhere)) is _elsewhere
    assert sending.packed_call(lambda x: x + offset, [4])() == 7
    again = sending.unpacked(sending.packed({"x": torch.ones(2)}))
    assert torch.equal(again["x"], torch.ones(2))


def _elsewhere() -> None: ...


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(RunError, match=r"(?s)QN307 .*\n  lock, which <lambda> uses, cannot be sent .*fix: make it"):
        sending.packed_call(lambda: lock, [])
    with pytest.raises(RunError, match=r"argument 1 cannot be sent to other processes: cannot pickle 'generator'"):
        sending.packed_call(print, [1, (x for x in "ab")])


def test_a_launch_within_the_import_of_a_script_is_noticed() -> None:
    code = compile("found = notice()", "script.py", "exec")
    for name, expected in (("__main__", False), ("__mp_main__", True)):
        main = {"__name__": name, "notice": lambda: sending.launched_by_import(sys._getframe())}
        exec(code, main)
        assert main["found"] is expected


def test_folders_of_ended_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, others, linked = tmp_path / "quintnet-old", tmp_path / "pymp-other", tmp_path / "elsewhere"
    for one in (old, others, linked):
        one.mkdir()
    for one in (old, linked):
        (one / run_folder.MARK).touch()
        os.utime(one / run_folder.MARK, (0, 0))
    (tmp_path / "quintnet-link").symlink_to(linked)
    with run_folder.run_folder(run_folder.new_folder()) as folder:
        run_folder.remove_abandoned()
        assert folder.exists() and not old.exists() and others.exists() and linked.exists()
        (folder / "attempt0").mkdir()
        (folder / "attempt0" / board.NAME).touch()
    assert not folder.exists()
    with run_folder.run_folder(run_folder.new_folder()) as folder:
        (folder / "rank0.txt").write_text("stacks")
    run_folder.remove_abandoned()
    assert [one.name for one in folder.iterdir()] == ["rank0.txt"]


# -- who is at fault


def _scene(tmp_path: Path, *reports: RankError, **more: object) -> Scene:
    rows = {0: RankStatus(waiting=True, pid=10), 1: RankStatus(pid=11, at="train.py:3 in f")}
    given = {"ended": {}, "stopped": (), **more}
    return Scene(2, rows, reports, stacks=tmp_path / "none", **given)  # type: ignore[arg-type]


def test_the_first_error_that_is_no_echo_is_the_cause(tmp_path: Path) -> None:
    echo = RankError(0, 1.0, "Connection closed by peer", "", distant=True)
    fault = _scene(tmp_path, echo, RankError(1, 2.0, "ValueError: no", "Traceback\n", distant=False)).fault()
    assert fault.ranks == (1,) and fault.again and fault.error.code == "QN302"
    assert "rank 1 raised ValueError: no" in str(fault.error)
    assert "rank 0: Connection closed by peer" in str(fault.error)
    mine = InputError("QN106", "5 rows")
    one = RankError(1, 2.0, "", "", False, mine)
    alone = _scene(tmp_path, one).fault().error
    assert isinstance(alone, InputError) and alone.code == "QN106"
    assert alone.message == "5 rows\n  raised on rank 1; rank 0 is at its start"
    assert _scene(tmp_path, one, replace(one, rank=0)).fault().error is mine  # every rank says so


def test_a_debugger_that_has_no_terminal_is_told_what_to_do(tmp_path: Path) -> None:
    left = RankError(1, 2.0, "BdbQuit: BdbQuit", "Traceback\n", distant=False)
    error = _scene(tmp_path, left).fault().error
    assert error.code == "QN302" and "no standard input" in error.fix and "without launch" in error.fix
    assert not _scene(tmp_path, replace(left, line="ValueError: no")).fault().error.fix


def test_a_process_that_something_holds_is_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "HELD_SECONDS", 0.05)
    seconds = []
    held = SimpleNamespace(pid=12, join=seconds.append, is_alive=lambda: True)
    ended = SimpleNamespace(pid=11, join=seconds.append, is_alive=lambda: False)
    faults.wait_for_killed([ended, held, ended])  # type: ignore[list-item]
    assert all(0 <= wait <= 0.05 for wait in seconds) and len(seconds) == 3
    assert "killed, and not ended yet: rank 1 (pid 12); a debugger" in capfd.readouterr().err
    faults.wait_for_killed([ended])  # type: ignore[list-item]
    assert not capfd.readouterr().err


def test_ranks_in_different_calls_are_named_once(tmp_path: Path) -> None:
    """Whatever happened to them after it, and whoever noticed."""
    calls = {"calls": 3, "inside": True}
    rows = {
        0: RankStatus(kind="save", name="save", line="train.py:41", **calls),  # type: ignore[arg-type]
        1: RankStatus(kind="step", name="step 2", line="train.py:37", **calls),  # type: ignore[arg-type]
    }
    text = "rank 0 is in save at train.py:41, rank 1 is in step 2 at train.py:37"
    lines = f"QN401 {text}", f"QN303 {text}"
    reports = [RankError(rank, 1.0, line, "", False, RunError(line[:5], text)) for rank, line in enumerate(lines)]
    for ended in ({}, {1: -signal.SIGABRT}):
        scene = Scene(2, rows, reports if not ended else reports[:1], ended, (), tmp_path)
        assert scene.certain and scene.fault().error.message == text and scene.fault().error.code == "QN401"


def test_killed_stopped_and_late_ranks(tmp_path: Path) -> None:
    echo = RankError(0, 1.0, "Application timeout", "", distant=True)
    killed = _scene(tmp_path, echo, ended={1: -signal.SIGKILL})
    assert killed.certain and "rank 1 was killed by SIGKILL before its first step (pid 11)" in str(killed.fault().error)
    assert "ended with exit code 3" in str(_scene(tmp_path, ended={1: 3}).fault().error)
    again = _scene(tmp_path, ended={2: sending.LAUNCHES_AGAIN}).fault()
    assert again.error.code == "QN307" and not again.again and "__main__" in str(again.error)
    assert "see what it printed" in str(_scene(tmp_path, ended={2: 1}).fault().error)
    assert "rank 1 is stopped (SIGSTOP)" in str(_scene(tmp_path, stopped=[1]).fault().error)
    late = _scene(tmp_path, echo)
    assert not late.certain and late.fault().ranks == (1,) and late.fault().error.code == "QN402"
    assert "rank 1 did not come before its first step (pid 11): it is at train.py:3 in f" in str(late.fault().error)
    assert not stopped(os.getpid()) and not stopped(None)


def test_neighbours_count_looks_in_silence(tmp_path: Path) -> None:
    store, watch = HashStore(), Neighbours(0, 3, 0.0, tmp_path)
    store.set("1", json.dumps({"beat": 1, "step": 4, "pid": 5, "host": "far"}))
    store.set("2", json.dumps({"beat": 1, "host": "far"}))
    store.set("0", "{}")
    assert watch.look(store) is None  # seen once: nothing is known of silence yet

    def said() -> str:
        found = watch.look(store)
        assert found is not None and found.code == "QN303"
        return found.message

    assert said() == "rank 1 has said nothing for 0 s in step 4 (pid 5 on far)"
    store.set("1", json.dumps({"beat": 2, "host": "far"}))
    assert said() == "rank 2 has said nothing for 0 s before its first step (pid 0 on far)"
    store.set("0", json.dumps({"calls": 3, "kind": "save", "name": "save", "line": "train.py:41", "inside": True}))
    store.set("2", json.dumps({"calls": 3, "kind": "step", "name": "step 2", "line": "train.py:37", "inside": True}))
    found = watch.look(store)
    assert found is not None and found.code == "QN401"


def test_an_attempt_gets_a_name_of_its_own() -> None:
    store = HashStore()
    found = [agree_on_attempt(store, 0, 1, 5.0) for _ in range(2)]
    assert found[0] != found[1] and all(name.startswith("quintnet/") for name in found)
    with pytest.raises(RunError, match="ranks did not come: 1"):
        agree_on_attempt(store, 0, 2, 0.0)


# -- where ranks can be


def test_a_place_is_left_out_after_two_faults_until_it_was_gone() -> None:
    there = {0, 1, 2}
    places = Places(3, 2, lambda: there)
    places.blame({2})
    assert places.available() == [0, 1, 2]
    places.blame({2})
    assert places.available() == [0, 1]
    places.blame({1})
    places.blame({1})
    assert places.available() == [0, 1]  # two are needed
    there -= {2}
    assert places.available() == [0, 1]
    there |= {2}
    assert places.available() == [0, 1, 2]
    with pytest.raises(CompileError, match=r"QN108.*\n?.*available returned \[0, 3\]"):
        Places(3, 1, lambda: [0, 3]).available()


def test_too_few_places_are_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def available() -> range:
        asked.append(0)
        return range(len(asked) - 1)

    assert Places(4, 2, available).wait(math.inf, Forwarding(1.0)) == [0, 1]
    assert capfd.readouterr().err.count("places [] are available, and at least 2 are needed: waiting") == 1
    with pytest.raises(RunError, match="QN304"):
        Places(4, 2, lambda: range(1)).wait(time.monotonic(), Forwarding(1.0))
    with pytest.raises(Preempted):
        Places(4, 2, lambda: range(1)).wait(math.inf, Forwarding(1.0, [signal.SIGTERM]))
