"""What a verb works on: a model, a batch and a loss, from a function of the user's or a configuration."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import typer

from .configured import from_config

Loaded = tuple[Any, Any, Any]  # model, batch, loss function or None


def load_target(target: str) -> Loaded:
    """Model, batch and loss function (or None) of ``package.module:builder`` or ``hf:CONFIG.json[,rows=8,...]``.

    The module is imported, as ``python -m`` does; a configuration is only read. torch is seeded before.

    Raises:
        typer.BadParameter: if there is no such function or file, or it gives something else: one line.
    """
    torch.manual_seed(0)  # equal values at every call, in every process
    if target.startswith("hf:"):
        return from_config(target)
    module, _, name = target.partition(":")
    if not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise _bad(f"{target!r} is not package.module:builder (nor hf:CONFIG.json)")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    builder = _explained(f"{target!r} cannot be loaded", lambda: _find(module, name))
    made = _explained(f"{target!r} failed", builder)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        kind = f"{len(made)} values" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise _bad(f"{target!r} must return model, batch[, loss_fn], and returned {kind}")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _find(module: str, name: str) -> Callable[[], Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, and no function")
    return found  # type: ignore[no-any-return]


def _explained(what: str, call: Callable[[], Any]) -> Any:
    """Whatever the user's code raises is one line, with the place that raised it."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename == __file__ or last.filename.startswith("<frozen")
        place = "" if ours else f" ({os.path.basename(last.filename)}:{last.lineno})"
        said = str(error).splitlines()
        raise _bad(f"{what}: {type(error).__name__}: {said[0] if said else ''}{place}") from None


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="TARGET")
