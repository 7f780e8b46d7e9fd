"""Private names of torch: graphs that became code.

The functions that this code calls, whatever somebody put in their places, and its texts, which torch keeps for
tracebacks until a process ends.
"""

from __future__ import annotations

import contextlib
import linecache
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.graph_module import _loader

__all__ = [
    "SHIPPED",  # torch as it was shipped, for generated code; instead: torch, whose functions users may replace
    "forgotten_texts", "goes_with_its_text", "is_as_shipped", "reads_shipped", "torch_with_linear",
]  # fmt: skip


def _namespace(source: types.ModuleType, **others: Any) -> Any:
    """Return a module with the variables that ``source`` has now, and ``others`` in the places of some."""
    namespace = types.ModuleType(source.__name__)
    vars(namespace).update({**vars(source), **others})
    return namespace


def _functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions in C++ of ``torch``, but for those that torch has in Python."""
    in_cpp, in_python = torch._C._VariableFunctions, set(torch.functional.__all__)
    names = (name for name in dir(in_cpp) if not name.startswith("_") and name in vars(torch))
    return {name: getattr(in_cpp, name) for name in names if name not in in_python}


if TYPE_CHECKING:
    SHIPPED = torch
else:
    SHIPPED = _namespace(torch, **_functions(), _C=_namespace(torch._C, _nn=_namespace(torch._C._nn)))


def is_as_shipped(function: Callable[..., Any]) -> bool:
    """Return whether torch still has ``function`` where it was, by which torch.fx writes its name; instead: True."""
    name = str(getattr(function, "__name__", ""))
    return getattr(torch, name, function) is function


def reads_shipped(module: fx.GraphModule) -> fx.GraphModule:
    """Make the code of ``module`` call torch's functions as they were, and return it; instead: nothing."""
    type(module).forward.__globals__["torch"] = SHIPPED
    return module


def torch_with_linear(call: Callable[..., Any]) -> Any:
    """Return torch as generated code reads it, where ``torch._C._nn.linear`` is ``call``."""
    return _namespace(SHIPPED, _C=_namespace(SHIPPED._C, _nn=_namespace(SHIPPED._C._nn, linear=call)))


def goes_with_its_text(module: fx.GraphModule) -> fx.GraphModule:
    """Forget the text of ``module`` when it ends, and return it; instead: nothing."""
    text = type(module).forward.__code__.co_filename
    weakref.finalize(module, _forget, (text,)).atexit = False
    return module


@contextlib.contextmanager
def forgotten_texts() -> Iterator[None]:
    """For traces: afterwards no text is kept of graphs that became code inside; instead: nothing."""
    older_texts = frozenset(_loader.eval_cache)
    try:
        yield
    finally:
        _forget(_loader.eval_cache.keys() - older_texts)


def _forget(texts: Iterable[str]) -> None:
    for text in texts:
        _loader.eval_cache.pop(text, None)
        linecache.cache.pop(text, None)
