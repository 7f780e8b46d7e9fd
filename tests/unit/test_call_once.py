"""Functions that run once, in any number of threads."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quintnet_compiler.checkpoint import lock
from quintnet_compiler.compat.interpreter import call_once

THREADS = 4


def test_threads_that_call_at_once_get_one_result() -> None:
    calls = list[int]()
    together = threading.Barrier(THREADS)

    @call_once
    def lock_of(number: int) -> object:
        calls.append(number)
        time.sleep(0.05)
        return object()

    def ask(number: int) -> object:
        together.wait(30)
        return lock_of(number)

    with ThreadPoolExecutor(THREADS) as threads:
        results = list(threads.map(ask, [1] * THREADS))
    assert calls == [1]
    assert len(set(map(id, results))) == 1
    assert lock_of(2) is lock_of(2) is not results[0]
    assert calls == [1, 2]
    assert lock_of(1) is not results[0]  # only the last one was kept


def test_an_error_is_not_kept_and_a_function_may_call_another() -> None:
    failures = [ValueError("first")]

    @call_once
    def inner() -> int:
        if failures:
            raise failures.pop()
        return 1

    @call_once
    def outer() -> int:
        return inner() + 1

    with pytest.raises(ValueError, match="first"):
        outer()
    assert outer() == outer() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    begun, end = threading.Event(), threading.Event()

    @call_once
    def value() -> int:
        if not begun.is_set():
            begun.set()
            end.wait(60)
        return os.getpid()

    thread = threading.Thread(target=value)
    thread.start()
    assert begun.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if value() == os.getpid() else 1)
    until = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    end.set()
    thread.join(30)
    assert ended == (child, 0)


def test_threads_whose_saves_are_the_first_of_a_process_share_its_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of them would have turns of its own."""
    usual = lock.ProcessHolds.__init__

    def slow(holds: lock.ProcessHolds) -> None:
        time.sleep(0.05)
        usual(holds)

    monkeypatch.setattr(lock.ProcessHolds, "__init__", slow)
    monkeypatch.setattr(lock, "_holds", call_once(lock._holds.__wrapped__))  # type: ignore[attr-defined]
    together = threading.Barrier(THREADS)

    def ask(_: int) -> lock.ProcessHolds:
        together.wait(30)
        return lock._holds()

    with ThreadPoolExecutor(THREADS) as threads:
        assert len(set(map(id, threads.map(ask, range(THREADS))))) == 1
