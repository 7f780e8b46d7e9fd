"""What of Python, torch and transformers is otherwise for a while: one thread at a time, and for that thread alone."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

SELDOM = (50_000, 20, 20)  # after how many new objects, and how many times that, the garbage collector looks
_TURN = threading.RLock()  # one for the process, as the functions that are replaced are


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Only one thread at a time is inside, so that each puts back what was there before; one thread, any number of
    times. Around compiling as a whole, for torch's own FakeTensorMode replaces a function of the process, too."""
    with _TURN:
        yield


@contextlib.contextmanager
def new_garbage_only() -> Iterator[None]:
    """The process' garbage collector looks only at objects that are made inside, and seldom: a look at all those of
    torch, transformers and earlier programs takes as long as a small compilation, and looks at graphs, which last, an
    eighth of a search. It is as before afterwards. As always where a program has frozen objects itself."""
    if gc.get_freeze_count():
        yield
        return
    often = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*(map(max, often, SELDOM) if often[0] else often))
    try:
        yield
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()


def all_objects() -> list[Any]:
    """What the garbage collector knows of, and what it does not look at for now, be it inside of
    :func:`new_garbage_only` or because a program has frozen objects: these are frozen again, with those made since."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    gc.collect()  # no garbage is frozen
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def for_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is ``ours`` where the calling thread calls it, and ``theirs`` in the program's other threads.

    Threads that Python did not start count as this one: autograd computes in threads of its own for other devices.
    """
    owner = threading.current_thread()

    @functools.wraps(theirs, updated=())  # of what is replaced, signatures are asked for
    def chosen(*args: Any, **kwargs: Any) -> Any:
        now = threading.current_thread()
        mine = now is owner or isinstance(now, threading._DummyThread)
        return (ours if mine else theirs)(*args, **kwargs)

    return chosen
