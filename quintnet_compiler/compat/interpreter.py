"""What Python's own library lacks: work before the interpreter ends, and functions that run once in all threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["call_once", "run_before_exit"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run_before_exit(call: Callable[[], None]) -> bool:
    """Have ``call`` run once the main thread has ended, before thread pools refuse new work.

    Instead: :func:`atexit.register`, whose functions run after that. It is used where Python has no such hook.

    Returns:
        Whether it will run. The interpreter may have begun to end before.
    """
    try:
        getattr(threading, "_register_atexit", atexit.register)(call)
    except RuntimeError:
        return False
    return True


def call_once(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return ``function`` that runs once, and later returns what it returned; other threads wait until it has.

    Instead: ``functools.cache``, which gives each of these threads a result of its own: two locks where one is meant.
    Of a function with arguments (positional ones), only the result of the last call is kept.
    """
    results: dict[tuple[object, ...], _T] = {}
    locks = [threading.RLock()]

    def release_in_fork() -> None:
        locks[0] = threading.RLock()

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return results[args]
        except KeyError:
            pass
        with locks[0]:
            if args in results:
                return results[args]
            result = function(*args, **kwargs)
            results.clear()
            results[args] = result
            return result

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=release_in_fork)
    return called
