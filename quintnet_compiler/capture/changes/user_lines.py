"""Record the user's line of every operator: torch records only those in methods called ``forward``."""

from __future__ import annotations

import sys
import traceback
import types
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode

from ...compat.torch import is_recording
from ...compat.torch_func import nodes_of_trace
from ..places import OWN, where_of
from .user_frames import user_frame

_CALLER = str(Path(__file__).parents[1] / "step_module.py")  # calls the model and the loss function
_RECORDED = "forward"  # the name of the functions whose lines torch records


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the innermost frame that is the user's and lies in the model or the loss; None in one of torch's own."""
    inner = user_frame(frame, OWN)
    while frame is not None and frame is not inner and frame.f_code.co_filename != _CALLER:
        frame = frame.f_back
    return inner if frame is inner else None


class UserLines(TorchFunctionMode):
    """A mode that gives operators of a trace the innermost line that is the user's."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        first_new = len(nodes_of_trace()) if is_recording() else 0
        result = func(*args, **(kwargs or {}))
        frame = _user_frame(sys._getframe(1)) if is_recording() else None
        if frame is not None:
            for node in nodes_of_trace()[first_new:]:
                if frame.f_code.co_name != _RECORDED or not where_of(node).source:
                    node.meta["stack_trace"] = "".join(traceback.format_stack(frame, limit=1))
        return result
