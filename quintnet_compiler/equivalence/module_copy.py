"""Copies of modules that train as the modules do: deepcopy drops the hooks of parameters."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..compat.torch_hooks import backward_hooks
from ..core.errors import CompileError
from ..guards.call_attributes import without_values


def module_copy(*modules: Any) -> list[Any]:
    """Return copies of modules, with modes and hooks; other objects are returned as they are.

    Copies share tensors as the modules do.

    Raises:
        CompileError: QN111 if a module cannot be copied.
    """
    memo = without_values({str(i): module for i, module in enumerate(modules) if isinstance(module, nn.Module)})
    try:
        copies = [copy.deepcopy(module, memo) if isinstance(module, nn.Module) else module for module in modules]
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200]
        raise CompileError("QN111", f"the module cannot be copied: {type(error).__name__}: {text}") from error
    for module, twin in zip(modules, copies, strict=True):
        pairs = zip(module.parameters(), twin.parameters(), strict=True) if isinstance(module, nn.Module) else ()
        for parameter, copied in pairs:
            if not backward_hooks(copied):  # shared ones have theirs
                for hook in (backward_hooks(parameter) or {}).values():
                    copied.register_hook(hook)
    return copies
