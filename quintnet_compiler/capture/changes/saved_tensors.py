"""Refuse changes of tensors that autograd has saved for the backward, as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.torch import version, without_torch_function
from ...compat.torch_func import nodes_of_trace
from ...core.errors import CompileError, Where
from ..places import where_of
from .memory import written_arguments

_CHANGED = "has been modified by an inplace operation"


def unchanged_since_saved(modules: Iterable[tuple[str, nn.Module]]) -> Callable[[Tensor], None]:
    """Return a check of the loss. Call this when a trace of ``modules`` begins.

    The check raises CompileError QN110 if forward has changed a tensor after an operator saved it for its derivative.
    PyTorch raises then, too; with ``.data`` it silently computes the derivative at the new value.
    """
    with without_torch_function():
        held = [(name, x, version(x)) for path, module in modules for name, x in _tensors(path, module)]

    def check(loss: Tensor) -> None:
        nodes = nodes_of_trace()
        writes = [node for node in nodes if any(written_arguments(node))]
        if (nodes and not writes) or not torch.is_grad_enabled() or (operator := _saved_before_a_change(loss)) is None:
            return
        with without_torch_function():
            changed = [name for name, x, old_version in held if version(x) != old_version]
        names = ", ".join(changed[:4]) if changed else "a tensor in place"
        raise CompileError(
            "QN110",
            f"the forward pass changes {names} after {operator} has saved what it needs of it for the backward",
            where=Where(changed[0].rpartition(".")[0]) if changed else where_of(writes[-1]),
            fix="change it before its first use, or after the optimizer's step"
            if changed
            else "change a copy: .clone()",
        )

    return check


def _tensors(path: str, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        yield ".".join(filter(None, (path, name))), x


def _saved_before_a_change(loss: Tensor) -> str | None:
    """Return the name of an operator of autograd's graph that cannot read a tensor that it has saved, or None."""
    with without_torch_function():
        todo: list[Any] = [loss.grad_fn]
        seen: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [source for source, _ in node.next_functions]
            for name in dir(type(node)):
                if not name.startswith("_saved_"):
                    continue
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    if _CHANGED in str(error):
                        return str(node.name()).removesuffix("0").removesuffix("Backward").lower()
    return None
