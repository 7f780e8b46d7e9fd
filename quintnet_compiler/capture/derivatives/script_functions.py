"""Run the Python source of torch.jit.script functions in a traced forward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ...compat.torch_script import script_calls_by, source_of
from ...core.errors import CompileError, Where
from ...core.replaced import for_this_thread
from ..changes.user_frames import user_line
from ..places import OWN


@contextlib.contextmanager
def script_functions_followed() -> Iterator[None]:
    """Let a call of such a function run its Python function inside.

    Raises:
        CompileError: QN105 for a call of what torch.jit.trace made, or of a method of a scripted module.
    """
    with script_calls_by(_called, for_this_thread):
        yield


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    source = source_of(function)
    if source is not None:
        return source(*args, **kwargs)
    raise CompileError(
        "QN105",
        f"{function.name!r} was made by torch.jit.trace, or of a module by torch.jit.script, which a trace does not "
        "see inside",
        where=Where("", user_line(sys._getframe(1), OWN)),
        fix="use what it was made of: the module or function in Python",
    )
