"""Lines of a loss function for the operators that it makes: torch notes those of modules alone."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from torch.overrides import TorchFunctionMode

from ...compat.torch import recording
from ...compat.torch_func import nodes_of_trace
from ..places import OWN, where_of
from ..watched_trace import user_frame


class LossLines(TorchFunctionMode):
    """While inside, operators of a trace have the innermost line that is the user's, if they have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(nodes_of_trace()) if recording() else 0
        made = func(*args, **(kwargs or {}))
        frame = user_frame(sys._getframe(1), OWN) if recording() else None
        if frame is not None:
            for node in nodes_of_trace()[before:]:
                if not where_of(node).source:
                    node.meta["stack_trace"] = "".join(traceback.format_stack(frame, limit=1))
        return made
