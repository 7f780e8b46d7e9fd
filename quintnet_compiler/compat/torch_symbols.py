"""Private names of torch: sizes that are symbols, and everything that was asked about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

if TYPE_CHECKING:
    from torch._guards import Source

__all__ = [
    "ShapeEnv",  # keeps answers about symbols as conditions; instead: torch.export, which takes functions of tensors
    "DimDynamic",  # how a symbol begins: with no condition; instead: torch.export.Dim, for inputs of a trace alone
    "constant_source",  # what a symbol is called in messages; instead: any source that ShapeEnv takes
    "enable_python_dispatcher",  # operators whose C++ asks for numbers run as Python; instead: decomposing them first
]


def constant_source(name: str) -> Source:
    """Return the name of a symbol as ShapeEnv takes it."""
    from torch._dynamo.source import ConstantSource  # half of the time in which this package is imported

    return ConstantSource(name)
