"""Private names of torch: texts of graphs that became code, which it keeps for tracebacks until a process ends."""

from __future__ import annotations

import contextlib
import linecache
import weakref
from collections.abc import Iterable, Iterator

from torch import fx
from torch.fx.graph_module import _loader

__all__ = ["forgotten_texts", "goes_with_its_text"]


def goes_with_its_text(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, whose text is forgotten when it is; instead: nothing."""
    text = type(module).forward.__code__.co_filename
    weakref.finalize(module, _forget, (text,)).atexit = False
    return module


@contextlib.contextmanager
def forgotten_texts() -> Iterator[None]:
    """For traces: afterwards no text is kept of graphs that became code inside; instead: nothing."""
    before = frozenset(_loader.eval_cache)
    try:
        yield
    finally:
        _forget(_loader.eval_cache.keys() - before)


def _forget(texts: Iterable[str]) -> None:
    for text in texts:
        _loader.eval_cache.pop(text, None)
        linecache.cache.pop(text, None)
