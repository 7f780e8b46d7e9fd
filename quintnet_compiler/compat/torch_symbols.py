"""Private names of torch: sizes that are symbols, and everything that was asked about them."""

from __future__ import annotations

from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = [
    "ShapeEnv",  # keeps answers about symbols as conditions; instead: torch.export, which takes functions of tensors
    "DimDynamic",  # how a symbol begins: with no condition; instead: torch.export.Dim, for inputs of a trace alone
    "ConstantSource",  # what a symbol is called in messages; instead: any source that ShapeEnv takes
    "enable_python_dispatcher",  # operators whose C++ asks for numbers run as Python; instead: decomposing them first
]
