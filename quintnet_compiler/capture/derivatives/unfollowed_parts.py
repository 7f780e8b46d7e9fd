"""Parts of a model that no trace follows, refused by their names before one begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...core.errors import CompileError, Where


def check_parts(model: nn.Module) -> None:
    """Look at the parts of ``model``, or of a loss function that is a module.

    Raises:
        CompileError: QN105 for parts that torch.jit made.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _scripted(f"the part {path!r}" if path else "the model", path)
        for name, value in vars(module).items():
            if isinstance(value, torch.jit.ScriptFunction):
                raise _scripted(f"the function {name!r}", path)


def check_variables(variables: Iterable[tuple[str, Any]]) -> None:
    """Look at what functions of the model read, by name.

    Raises:
        CompileError: QN105 for functions that torch.jit made.
    """
    for name, value in variables:
        if isinstance(value, torch.jit.ScriptFunction):
            raise _scripted(f"the function {name!r}", "")


def _scripted(what: str, path: str) -> CompileError:
    return CompileError(
        "QN105",
        f"{what} was made by torch.jit.script or torch.jit.trace, which a trace does not see inside",
        where=Where(path, ""),
        fix="use what it was made of: the module or function in Python",
    )
