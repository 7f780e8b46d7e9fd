"""Refuse modules that cannot be traced, by name, before a trace begins."""

from __future__ import annotations

import torch
from torch import nn

from ...compat.torch_settings import part_left_out
from ...core.errors import CompileError, Where


def check_parts(model: nn.Module, *, training: bool = True) -> None:
    """Raise CompileError QN105 for parts of a model, or of a loss function that is a module, that cannot be followed.

    torch.jit made them, or evaluation (also in a step, with ``training``) leaves a part of theirs out.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = "was made by torch.jit.script or torch.jit.trace, which a trace does not see inside"
            fix = "use what it was made of: the module in Python; values go over with load_state_dict"
        elif left_out := part_left_out(module, training=training):
            what = f"has another {left_out!r} than torch's kernel computes, which evaluates it without gradients"
            fix = "set activation_relu_or_gelu = 0 of the layer: the module computes with its own parts then, too"
        else:
            continue
        label = f"the part {path!r}" if path else "the model"
        raise CompileError("QN105", f"{label} {what}", where=Where(path, ""), fix=fix)
