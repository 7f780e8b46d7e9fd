"""Temporary changes of Python, torch and transformers: by one thread at a time, and for that thread alone."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

MIN_GC_THRESHOLDS = (50_000, 20, 20)  # see gc.set_threshold
_LOCK = threading.RLock()  # the replaced functions belong to the process, and so does the lock


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Admit one thread at a time, which may enter any number of times.

    So each thread restores what it replaced before another replaces it. It guards compiling as a whole, since
    torch's own FakeTensorMode replaces a function of the process, too.
    """
    with _LOCK:
        yield


@contextlib.contextmanager
def new_garbage_only() -> Iterator[None]:
    """Let the garbage collector scan only objects that are created inside, and rarely.

    A scan of all objects of torch, transformers and earlier programs takes as long as a small compilation; scans of
    graphs, which live on, take an eighth of a search. The settings are restored afterwards. Nothing changes where a
    program has frozen objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*(map(max, thresholds, MIN_GC_THRESHOLDS) if thresholds[0] else thresholds))
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def all_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks, frozen ones included.

    :func:`new_garbage_only` or the program may have frozen them. They are frozen again, with those created since.
    """
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    gc.collect()  # no garbage is frozen
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def for_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is ``ours`` in the calling thread, and ``theirs`` in the program's other threads.

    Threads that Python did not start count as the calling one: autograd has threads of its own for other devices.
    """
    owner = threading.current_thread()

    @functools.wraps(theirs, updated=())  # torch and transformers inspect signatures
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        is_owner = thread is owner or isinstance(thread, threading._DummyThread)
        return (ours if is_owner else theirs)(*args, **kwargs)

    return dispatch
