"""Modes: training follows each module's own, evaluation puts all in evaluation mode; autocast is refused; code that
asks whether it is compiled is told no; inference mode is seen by a trace."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..compat.torch import TorchDispatchMode
from ..compat.torch_func import (
    count_dispatch_modes,
    count_function_modes,
    default_device,
    dispatch_modes,
    dispatch_modes_off,
    function_modes,
    only_function_modes,
    saved_tensors_hooked,
    set_grad,
)
from ..compat.torch_hooks import module_calls_traced
from ..compat.torch_settings import QUESTIONS, questions_answered
from ..core import code_origin
from ..core.errors import CompileError, Where
from ..core.replaced import for_this_thread, one_thread
from ..guards.hooks import unwatched


@contextlib.contextmanager
def evaluating(tree: nn.Module) -> Iterator[None]:
    """While inside, every module of ``tree`` is in evaluation mode; afterwards each has its own mode again."""
    modes = [(module, module.training) for module in tree.modules()]
    tree.eval()
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextlib.contextmanager
def modes_of_a_trace() -> Iterator[None]:
    """While inside, autocast is off, as torch.export would not trace its casts; and what is traced sees where
    torch.inference_mode begins and ends, as it sees torch.no_grad; and the ``nn.Module.__call__`` that there
    is now is called.
    """
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_inference_is_without_gradients())
        stack.enter_context(module_calls_traced())
        yield


@contextlib.contextmanager
def modes_left() -> Iterator[None]:
    """Turn the modes that are on around ``quintnet.compile`` off while inside.

    These are inference mode (gradients stay off), autocast, fake tensors and other modes that see operators or modules,
    the user's modes that see torch's functions, hooks of what autograd saves, and autograd's search for anomalies.
    Whether gradients are on is left to :func:`capture`.
    """
    gradients = torch.is_grad_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(dispatch_modes_off())
        stack.enter_context(only_function_modes(lambda mode: not is_users_mode(mode)))
        stack.enter_context(unwatched())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if saved_tensors_hooked():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Turn the user's modes that see calls of torch's functions off while inside.

    So is the meta device as the default one, on which a module may have been built: a program is that of the module
    outside of them.
    """
    meta = torch.device("meta")
    with only_function_modes(lambda mode: not is_users_mode(mode) and default_device([mode]) != meta):
        yield


def is_users_mode(mode: TorchFunctionMode | TorchDispatchMode) -> bool:
    """Return whether a mode is neither torch's nor this package's."""
    return type(mode).__module__.partition(".")[0] not in ("torch", "quintnet", "quintnet_compiler")


@contextlib.contextmanager
def uncompiled(own: tuple[str, ...]) -> Iterator[None]:
    """While inside, code outside of the folders ``own`` that asks whether it is compiled or exported is told no, as
    when the module runs by itself: what it does only for a trace would not be what the module does. torch's own code
    is told what is so.
    """

    def answer(truth: bool) -> bool:
        asks: types.FrameType | None = sys._getframe(2)
        while asks is not None and asks.f_code.co_name in QUESTIONS:  # torch has several functions of these names
            asks = asks.f_back
        return truth and asks is not None and asks.f_code.co_filename.startswith(own)

    with questions_answered(answer, for_this_thread):
        yield


@contextlib.contextmanager
def _inference_is_without_gradients() -> Iterator[None]:
    """Only one thread at a time is inside."""
    with one_thread():
        yield from _switched_by_inference_mode()


def _switched_by_inference_mode() -> Iterator[None]:
    enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    before: list[bool] = []  # whether gradients were on around each of the modes that have begun

    def entered(mode: torch.inference_mode) -> None:
        before.append(torch.is_grad_enabled())
        enter(mode)
        set_grad(not mode.mode)

    def left(mode: torch.inference_mode, *error: Any) -> None:
        leave(mode, *error)
        set_grad(before.pop())

    with (
        mock.patch.object(torch.inference_mode, "__enter__", for_this_thread(entered, enter)),
        mock.patch.object(torch.inference_mode, "__exit__", for_this_thread(left, leave)),
    ):
        yield


def refuse_modes(device: torch.device) -> None:
    """Refuse modes around a program that would change what the module computes.

    Raises:
        CompileError: QN105 inside a region of autocast, whose casts no program has, and inside a mode of the user's
            that changes calls of torch's functions, which no program makes, or operators, of which it has others.
    """
    if torch.is_autocast_enabled(device.type):
        raise CompileError(
            "QN105",
            "torch.autocast is on around a program, which computes in the dtypes that it was compiled for",
            fix='give quintnet.compile precision="bf16" (or "fp16"), and run the program outside of torch.autocast',
        )
    users = [type(mode).__name__ for mode in function_modes() if is_users_mode(mode)] if count_function_modes() else []
    if users:
        raise CompileError(
            "QN105",
            f"{users[-1]}, a TorchFunctionMode, is on around a program, which does not call torch's functions as the "
            "module does",
            fix=f"enter {users[-1]} in the module's forward (and in the loss function), where it is traced, and run "
            "the program outside of it",
        )
    users = [type(mode).__name__ for mode in dispatch_modes() if is_users_mode(mode)] if count_dispatch_modes() else []
    if users:
        raise CompileError(
            "QN105",
            f"{users[-1]}, a TorchDispatchMode, is on around a program, whose operators are not those of the module",
            fix=f"run the program outside of {users[-1]}, or the plain module inside of it",
        )


_NOT_THE_USERS = (code_origin.PACKAGE, code_origin.TORCH)  # what replaces functions while it traces is no user's


def refuse_replaced(func: Any, caller: types.FrameType | None) -> None:
    """Refuse a function of the user's that torch takes for its own, as it was put in the place of that one.

    Under a mode that sees calls of torch's functions, as a trace has, PyTorch looks the function up again by its name.
    A replacement that calls the original would be called by it.

    Args:
        func: what ``__torch_function__`` of a mode was given.
        caller: the frame that called it.

    Raises:
        CompileError: QN105.
    """
    if not isinstance(func, types.FunctionType) or func.__code__.co_filename.startswith(_NOT_THE_USERS):
        return
    if caller is not None and caller.f_code is handle_torch_function.__code__:
        caller = caller.f_back
        if caller is None or not caller.f_code.co_filename.startswith(code_origin.TORCH):
            return  # a function of the user's that asks modes, as torch's own do
    code = func.__code__
    raise CompileError(
        "QN105",
        f"a function or method of torch was replaced by {func.__qualname__!r}, which calls the original; while it is "
        "traced, PyTorch would call the replacement in place of the original, too",
        where=Where("", f"{Path(code.co_filename).name}:{code.co_firstlineno}"),
        fix="call the replacement under a name of its own, in the forward of the module",
    )
