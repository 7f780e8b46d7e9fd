"""compat.interpreter: which hook is used, and that a refusal is an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from quintnet_compiler.compat.interpreter import run_before_exit


def test_the_hook_of_threads_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Callable[[], None]]] = []
    monkeypatch.setattr("threading._register_atexit", lambda call: calls.append(("threads", call)))
    monkeypatch.setattr("atexit.register", lambda call: calls.append(("atexit", call)))
    assert run_before_exit(print)
    monkeypatch.delattr(threading, "_register_atexit")
    assert run_before_exit(print)
    assert calls == [("threads", print), ("atexit", print)]


def test_a_failure_of_the_hook_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(call: object) -> None:
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr("threading._register_atexit", refuses)
    assert not run_before_exit(lambda: None)
