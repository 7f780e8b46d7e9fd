"""Private names of Python: what runs when the interpreter begins to end."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["run_before_exit"]


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
