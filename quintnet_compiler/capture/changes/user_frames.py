"""The line of the user's code that a trace is in, or that changed something."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...guards.function_reads import STDLIB
from ...guards.python_state import Change


def _is_library(file: str, own: tuple[str, ...]) -> bool:
    return file.startswith((*own, "<")) or (file.startswith(STDLIB) and "-packages" not in file)


def user_frame(frame: types.FrameType | None, own: tuple[str, ...]) -> types.FrameType | None:
    """Return the innermost frame of a stack that is the user's."""
    while frame is not None and _is_library(frame.f_code.co_filename, own):
        frame = frame.f_back
    return frame


def user_line(frame: types.FrameType | None, own: tuple[str, ...]) -> str:
    """Return the innermost line of a stack that is the user's."""
    frame = user_frame(frame, own)
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number).strip()
    return f"{Path(name).name}:{number}" + (f": {text}" if text else "")


def line_of_change(again: Callable[[], Any], changes: Sequence[Change], own: tuple[str, ...]) -> str:
    """Run the trace again, and return the line after which the first of ``changes`` exists."""
    at: dict[types.FrameType, int] = {}  # the line that a frame is in
    culprit: list[tuple[str, int]] = []

    class Found(Exception):
        pass

    def line(frame: types.FrameType, event: str, argument: Any) -> Any:
        if changes[0].changed():
            here: types.FrameType | None = frame
            while here is not None and here not in at:
                here = here.f_back
            if here is not None:
                culprit.append((here.f_code.co_filename, at[here]))
            raise Found
        if event == "line":
            at[frame] = frame.f_lineno
        if event == "return":
            at.pop(frame, None)
        return line

    def call(frame: types.FrameType, event: str, argument: Any) -> Any:
        return None if _is_library(frame.f_code.co_filename, own) else line

    previous = sys.gettrace()
    sys.settrace(call)
    try:
        again()
    except Exception as error:  # Found, or another error that the user's code made of it
        del error
    finally:
        sys.settrace(previous)
    if not culprit:
        return ""
    name, number = culprit[0]
    return f"{Path(name).name}:{number}: {linecache.getline(name, number).strip()}".removesuffix(": ")
