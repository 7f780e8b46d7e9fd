"""Refuse modules that cannot be traced, by name, before a trace begins."""

from __future__ import annotations

import torch
from torch import nn

from ...core.errors import CompileError, Where


def check_parts(model: nn.Module) -> None:
    """Check the submodules of ``model``, or of a loss function that is a module.

    Raises:
        CompileError: QN105 for modules that torch.jit made.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"the part {path!r}" if path else "the model"
            raise CompileError(
                "QN105",
                f"{what} was made by torch.jit.script or torch.jit.trace, which a trace does not see inside",
                where=Where(path, ""),
                fix="use what it was made of: the module in Python; values go over with load_state_dict",
            )
