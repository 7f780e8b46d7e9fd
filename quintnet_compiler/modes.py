"""Modes of modules: training follows each module's own, evaluation puts all of them in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


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
