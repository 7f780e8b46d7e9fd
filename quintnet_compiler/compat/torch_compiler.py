"""Private names of torch: what it answers code that asks whether it is being compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

__all__ = ["QUESTIONS", "questions_answered"]

# Each function that is asked, and what it reads.
_FLAGS = {"is_compiling": "_is_compiling_flag", "is_exporting": "_is_exporting_flag"}
QUESTIONS = frozenset(_FLAGS)


@contextlib.contextmanager
def questions_answered(answer: Callable[[bool], bool], replace: Any) -> Iterator[None]:
    """Inside, ``torch.compiler.is_compiling()`` and ``is_exporting()`` are ``answer(what they were before)``; no, for
    code that imported them by name. ``replace(ours, theirs)`` is what the process calls meanwhile. Instead of the
    flags: the functions alone, and code that imported them is told what torch.export set."""
    with contextlib.ExitStack() as stack:
        for name, flag in _FLAGS.items():
            theirs, truth = getattr(torch.compiler, name), getattr(torch.compiler, flag)
            stack.enter_context(mock.patch.object(torch.compiler, flag, False))
            stack.enter_context(mock.patch.object(torch.compiler, name, replace(partial(answer, truth), theirs)))
        yield
