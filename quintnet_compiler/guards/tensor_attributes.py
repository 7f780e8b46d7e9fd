"""Attributes that users gave to parameters and buffers, read in forward: a trace's tensors have none of their own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from ..compat.torch import FakeTensor, FunctionalTensor
from ..core.code_origin import TORCH
from ..core.errors import CompileError, Where
from .attribute_reads import Reads, TensorPlace

_TO_PYTHON = frozenset(("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__"))
_NUMBERS = frozenset(("__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__"))
GET_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]


@dataclass(frozen=True)
class OriginalTensor:
    """A parameter or buffer of a module, in whose place a trace puts a tensor of its own."""

    place: TensorPlace
    tensor: Tensor


def gives_numbers(func: Any) -> bool:
    """Return whether a method of tensors gives values to Python."""
    return getattr(func, "__name__", "") in _TO_PYTHON | _NUMBERS


def writes_in_place(func: Any) -> bool:
    """Return whether a function of torch writes to the tensor that it is given."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name[2] == "i" and name[2:-2] not in ("index", "int", "invert"))
    return name.endswith("_") and name not in ("requires_grad_", "detach_", "share_memory_", "rename_")


StandIns = Mapping[int, OriginalTensor]  # by the id of the trace's tensor


def originals_of(modules: Iterable[tuple[str, nn.Module]]) -> list[OriginalTensor]:
    """Return all parameters and buffers of these modules, each with its path, in their places."""
    return [
        OriginalTensor(TensorPlace(".".join(filter(None, (path, name))), space, name), x)
        for path, module in modules
        for space in (module._parameters, module._buffers)
        for name, x in space.items()
        if x is not None
    ]


def stand_ins_of(originals: Iterable[OriginalTensor]) -> StandIns:
    """Return the module's tensors by the ``id`` of what is in their places now."""
    now = ((original.place.space.get(original.place.name), original) for original in originals)
    return {id(x): original for x, original in now if x is not None and x is not original.tensor}


@contextlib.contextmanager
def attributes_of(originals: StandIns, reads: Reads) -> Iterator[None]:
    """Inside, a trace's tensors have the attributes of the module's tensors, and ``reads`` records which are read."""

    def attribute(this: Any, name: str) -> Any:
        original = originals.get(id(this))
        if original is not None and not name.startswith("__"):
            fields = vars(original.tensor)
            if name in fields:
                reads.note_of_tensor(original.place, original.tensor, name, fields[name])
                return fields[name]
            if not sys._getframe(1).f_code.co_filename.startswith(TORCH):
                reads.miss_of_tensor(original.place, original.tensor, name)
        raise AttributeError(f"{type(this).__name__!r} object has no attribute {name!r}")

    with (
        mock.patch.object(FakeTensor, "__getattr__", attribute, create=True),
        mock.patch.object(FunctionalTensor, "__getattr__", attribute, create=True),
    ):
        yield


def reads_a_gradient(original: OriginalTensor, line: str) -> CompileError:
    """Return the error for a forward pass that reads the gradient of a parameter, at ``line``."""
    return CompileError(
        "QN110",
        f"the forward pass reads the gradient of {original.place.path!r}, which changes from step to step; a program "
        "would take what was there when it was traced",
        where=Where("", line),
        fix="read it between two steps, and pass what depends on it in the batch or keep it in an attribute",
    )
