"""Parts of a model that no trace follows, refused by their names before one begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod

from ...compat.torch_hooks import CALL_HOOKS, pruned_by
from ...core.errors import CompileError, Where


def check_parts(model: nn.Module) -> None:
    """Look at the parts of ``model``, or of a loss function that is a module.

    Raises:
        CompileError: QN105 for parts that torch.jit made, QN110 for weights that torch.nn.utils.prune masks.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise _scripted(f"the part {path!r}" if path else "the model", path)
        for name, value in vars(module).items():
            if isinstance(value, torch.jit.ScriptFunction):
                raise _scripted(f"the function {name!r}", path)
        for name in _pruned(module):
            raise CompileError(
                "QN110",
                f"torch.nn.utils.prune makes {name!r} before each call and keeps it as an attribute, which a program "
                "would not",
                where=Where(path, ""),
                fix=f'torch.nn.utils.prune.remove(part, "{name}") before you compile; or, if zeros are to stay zeros, '
                "the mask as a parametrization (torch.nn.utils.parametrize)",
            )


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


def _pruned(module: nn.Module) -> Iterator[str]:
    for hook in getattr(module, CALL_HOOKS).values():
        if isinstance(hook, BasePruningMethod):
            yield pruned_by(hook)
