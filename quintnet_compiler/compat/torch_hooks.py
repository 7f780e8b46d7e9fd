"""Private names of torch: hooks of modules and parameters, and derivatives that users write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction as FunctionBase
from torch.nn.modules import module as nn_module

__all__ = [
    "FunctionBase",  # the class whose defaults tell which methods a Function has; instead: torch.autograd.Function's
    "CALL_HOOKS", "MODULE_HOOKS", "GLOBAL_HOOKS", "GLOBAL_BACKWARD_HOOKS", "accumulation_hooks", "backward_hooks",
    "functions_applied_by", "module_backward_hooks_by", "node_class", "old_backward_hooks", "share_backward_hooks",
    "share_hooks", "without_hooks_of_export",
]  # fmt: skip

# Where a module keeps its hooks, which guards compare; instead: noticing calls of register_*_hook. This package sets
# one of the first kind, to refuse calls.
CALL_HOOKS = "_forward_pre_hooks"
MODULE_HOOKS = (CALL_HOOKS, "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Hooks of all modules, each kind one dict for the life of the process; instead: likewise.
GLOBAL_BACKWARD_HOOKS: tuple[Mapping[int, Any], ...] = (
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)
GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)

# A tensor's hooks by the number of their handle, or None; instead: likewise. Hot: guards read them with map().
backward_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
accumulation_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")


def share_backward_hooks(source: Tensor, target: Tensor) -> None:
    """``target`` has the hooks of ``source``, later ones too; instead: registering each again, once."""
    target._backward_hooks = source._backward_hooks


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Likewise, and those that run when a gradient was accumulated."""
    share_backward_hooks(source, target)
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def old_backward_hooks(module: nn.Module) -> dict[int, Any]:
    """Those of register_backward_hook, which no trace follows; instead: none, once torch removes that method."""
    return {} if module._is_full_backward_hook else dict(module._backward_hooks)


@contextlib.contextmanager
def module_backward_hooks_by(make: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's call asks ``make`` for what runs its backward hooks; instead: registering our own hooks."""
    with mock.patch.object(nn_module, "BackwardHook", make):
        yield


@contextlib.contextmanager
def functions_applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``Function.apply`` is ``apply(cls, *args)``; instead: torch.export that keeps user-written Functions."""
    with mock.patch.object(FunctionBase, "apply", classmethod(apply), create=True):
        yield


def node_class(node: object) -> type | None:
    """The Function that made a node of autograd's graph; instead: ``type(node).__name__``."""
    return getattr(node, "_forward_cls", None)


@contextlib.contextmanager
def without_hooks_of_export() -> Iterator[None]:
    """Afterwards no hook is left of torch.export, which in torch 2.11 forgets one where it gives up: for the buffers of
    all modules, and it keeps the module that was traced. Instead: nothing, from torch 2.13 on."""
    from torch.export import _trace  # imported by the first export

    made: list[Any] = []
    here, register = threading.get_ident(), vars(_trace)["register_buffer_assignment_hook"]

    def noted(*given: Any) -> Any:
        handle = register(*given)
        if threading.get_ident() == here:
            made.append(handle)
        return handle

    with mock.patch.object(_trace, "register_buffer_assignment_hook", noted):
        try:
            yield
        finally:
            for handle in made:
                handle.remove()
