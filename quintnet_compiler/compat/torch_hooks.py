"""Private names of torch: hooks of modules and parameters, and derivatives that users write."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction as FunctionBase
from torch.fx import _symbolic_trace
from torch.nn.modules import module as nn_module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = [
    "FunctionBase",  # the class whose defaults tell which methods a Function has; instead: torch.autograd.Function's
    "CALL_HOOKS", "MODULE_HOOKS", "STATE_DICT_PARTS",
    "GLOBAL_HOOKS", "GLOBAL_BACKWARD_HOOKS", "accumulation_hooks", "author_of",
    "backward_hooks",
    "functions_applied_by", "have_no_hooks", "initialise_lazy", "initialised_by",
    "is_lazy_module", "made_before_calls", "make_again",
    "module_backward_hooks_by", "module_calls_traced",
    "node_class", "old_backward_hooks", "runs_backward", "set_hooks", "share_backward_hooks", "share_hooks",
    "takes_gradients_as_list", "without_hooks_of_export",
]  # fmt: skip

# Where a module keeps its hooks, which guards compare; instead: noticing calls of register_*_hook. This package sets
# one of the first kind, to refuse calls.
CALL_HOOKS = "_forward_pre_hooks"
MODULE_HOOKS = (CALL_HOOKS, "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# What decides beside its tensors what is in a module's state_dict(), where forward asks for it; instead: nothing.
STATE_DICT_PARTS = ("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")

# Hooks of all modules, each kind one dict for the life of the process; instead: likewise.
GLOBAL_BACKWARD_HOOKS: tuple[Mapping[int, Any], ...] = (
    nn_module._global_backward_hooks,
    nn_module._global_backward_pre_hooks,
)
GLOBAL_HOOKS: tuple[MutableMapping[int, Any], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)

# A tensor's hooks by the number of their handle, or None; instead: likewise. Hot: guards read them with map().
backward_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
accumulation_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")


def have_no_hooks(parameters: Iterable[Tensor], requires_grad: bool) -> bool:
    """Return whether parameters have this flag and never had a hook.

    Instead: ``requires_grad``, and ``backward_hooks``. Hot: for each one before each step, so without a call.
    """
    for parameter in parameters:
        if parameter.requires_grad is not requires_grad or parameter._backward_hooks is not None:
            return False
    return True


def share_backward_hooks(source: Tensor, target: Tensor) -> None:
    """Let ``target`` have the hooks of ``source``, later ones too; instead: registering each again, once."""
    target._backward_hooks = source._backward_hooks


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Do likewise, and share the hooks that run when a gradient was accumulated."""
    share_backward_hooks(source, target)
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def set_hooks(tensor: Tensor, backward: dict[int, Any] | None, accumulation: dict[int, Any] | None) -> None:
    """Let a tensor have these hooks; instead: removing each by its handle, which its user keeps."""
    if backward is not backward_hooks(tensor):
        tensor._backward_hooks = backward
    if accumulation is not accumulation_hooks(tensor):  # None would leave the last ones: {} removes them
        tensor._post_accumulate_grad_hooks = accumulation  # type: ignore[assignment]


@contextlib.contextmanager
def module_calls_traced() -> Iterator[None]:
    """Let torch.fx trace calls of modules by the ``nn.Module.__call__`` that there is now, while inside.

    It takes the one that there was when torch was imported. Instead: a class of modules in the place of each.
    """
    with mock.patch.object(_symbolic_trace, "_orig_module_call", nn.Module.__call__):
        yield


def is_lazy_module(module: nn.Module) -> bool:
    """Return whether a module is lazy and not yet called; instead: missing shapes, which ``load_state_dict`` fills."""
    return isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")


def initialised_by(module: nn.Module, begin: Callable[..., None]) -> None:
    """Let a lazy module's first call begin with ``begin(module, args, kwargs)``, in place of the hook that initialises.

    Instead: another hook, which would not know the changes of those before it.
    """
    handle: Any = module._initialize_hook
    getattr(module, CALL_HOOKS)[handle.id] = begin


def initialise_lazy(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Initialise a lazy module as before its first call; instead: ``initialize_parameters``, and changing its class."""
    module._infer_parameters(module, args, kwargs)  # type: ignore[operator]


def made_before_calls(hook: Any) -> str:
    """Return the name of the weight that a hook computes before calls, else ""; instead: names that end in "_orig"."""
    if isinstance(hook, BasePruningMethod):
        return str(hook._tensor_name)
    return str(hook.name) if isinstance(hook, (WeightNorm, SpectralNorm)) else ""


def make_again(hook: Any, module: nn.Module) -> None:
    """Make such an attribute of the parameters and buffers that a module has now, which stay as they are.

    Instead: the call of the hook, which changes the buffers of a spectral norm.
    """
    if isinstance(hook, SpectralNorm):
        setattr(module, hook.name, hook.compute_weight(module, do_power_iteration=False))
    else:
        hook(module, ())


def old_backward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks of register_backward_hook, which no trace follows; instead: none, once torch removes it."""
    return {} if module._is_full_backward_hook else dict(module._backward_hooks)


@contextlib.contextmanager
def module_backward_hooks_by(make: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's call asks ``make`` for what runs its backward hooks; instead: registering our own hooks."""
    with mock.patch.object(nn_module, "BackwardHook", make):
        yield


_GENERATED = "torch._functorch.autograd_function"

# Until torch 2.13, Function.apply is Python that calls the next class's; from 2.14 on it is that of C++ itself.
_APPLY_IN_CPP = not isinstance(vars(Function)["apply"], classmethod)


@contextlib.contextmanager
def functions_applied_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``Function.apply`` is ``apply(cls, *args, **kwargs)``, with defaults where torch fills them in; instead:
    torch.export that keeps user-written Functions."""

    def with_defaults(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.setup_context is not FunctionBase.setup_context:
            bound = inspect.signature(function.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        return apply(function, *args, **kwargs)

    owner, applied = (Function, with_defaults) if _APPLY_IN_CPP else (FunctionBase, apply)
    with mock.patch.object(owner, "apply", classmethod(applied), create=True):
        yield


def takes_gradients_as_list(function: type[Function]) -> bool:
    """Return whether a Function's backward takes one list (torch 2.14); instead: no Function that asks for it."""
    return hasattr(FunctionBase, "boxed_grads_call") and bool(getattr(function, "boxed_grads_call", False))


def author_of(function: type[Function]) -> type[Function]:
    """Return the Function that a user wrote, also of one that torch derived for torch.vmap (``generate_vmap_rule``).

    Instead: the same rule written as the Function's own ``vmap``.
    """
    while function.__module__ == _GENERATED and getattr(function, "generate_vmap_rule", False):
        rule: Any = function.forward
        function = rule.__closure__[rule.__code__.co_freevars.index("autograd_function")].cell_contents
    return function


def node_class(node: object) -> type | None:
    """Return the Function that made a node of autograd's graph; instead: ``type(node).__name__``."""
    return getattr(node, "_forward_cls", None)


@contextlib.contextmanager
def without_hooks_of_export() -> Iterator[None]:
    """Afterwards no hook is left of torch.export, which in torch 2.11 forgets one where it gives up: for the buffers of
    all modules, and it keeps the module that was traced. Instead: nothing, from torch 2.13 on."""
    from torch.export import _trace  # imported by the first export

    handles: list[Any] = []
    here, register = threading.get_ident(), vars(_trace)["register_buffer_assignment_hook"]

    def noted(*args: Any) -> Any:
        handle = register(*args)
        if threading.get_ident() == here:
            handles.append(handle)
        return handle

    with mock.patch.object(_trace, "register_buffer_assignment_hook", noted):
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def runs_backward() -> bool:
    """Return whether autograd runs a backward on this thread. Instead: none, hooks are not told."""
    return bool(torch._C._current_graph_task_id() != -1)
