"""Modes: training follows each module's own, evaluation puts all in evaluation mode; autocast is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ..core.errors import CompileError


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
def without_autocast() -> Iterator[None]:
    """While inside, autocast is off: torch.export would not trace its casts."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def refuse_autocast(device: torch.device) -> None:
    """Raises: CompileError QN105 inside a region of autocast, whose casts no program has."""
    if torch.is_autocast_enabled(device.type):
        raise CompileError(
            "QN105",
            "torch.autocast is on around a program, which computes in the dtypes that it was compiled for",
            fix='give quintnet.compile precision="bf16" (or "fp16"), and run the program outside of torch.autocast',
        )
