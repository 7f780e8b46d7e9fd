"""Slices of DTensors along a split dim, which torch copies: what is written into them reaches the whole tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..compat.distributed import dtensor_operators, handle_dtensor_operators, handled_by_torch, local_tensor
from ..compat.interpreter import call_once
from ..compat.torch import pytree, version, writing_operators
from .local_values import part_like

aten = torch.ops.aten
_CUTS = (aten.diagonal, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.squeeze, aten.view)
_OTHER_VIEWS = (aten.alias, aten.detach, aten.expand, aten.permute, aten.t, aten.transpose, aten.unbind, aten.unsqueeze)
_WRITES = threading.RLock()  # a tensor is read as a whole, changed and written: by one thread at a time
Usual = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


@dataclass
class SliceSource:
    """Describe what a copied slice was taken from.

    Attributes:
        whole: the tensor that was sliced.
        take: returns this slice of any tensor of that shape.
        version: that of ``whole`` when its values were copied.
    """

    whole: DTensor
    take: Callable[[Any], Any]
    version: int


@call_once
def write_to_copied_slices() -> None:
    """Let in-place operators of this process write into copied slices of DTensors as into views, from now on."""
    _wrap(_overloads(_CUTS), _take)
    _wrap([aten.fill_.Tensor], _fill)
    _wrap([aten.detach_.default], _itself)  # torch 2.11 has no rule for it


@call_once
def _follow_slices() -> None:
    """Follow views of slices, and writes: from the first slice on, as operators become a little slower."""
    _wrap(_overloads(_OTHER_VIEWS), _take)
    _wrap(writing_operators(), _write)


def _itself(usual: Usual, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor: below autograd, there is nothing to detach it from."""
    return args[0]


def _overloads(packets: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(getattr(packet, name) for packet in packets for name in packet.overloads())


def _wrap(functions: Sequence[Any], around: Callable[..., Any]) -> None:
    """Let ``around(usual, function, args, kwargs)`` compute these operators of DTensors, from now on."""
    handlers = dtensor_operators()
    usual = {function: partial(_usual, handlers.get(function)) for function in functions}
    handle_dtensor_operators({function: partial(around, computes) for function, computes in usual.items()})


def _usual(handler: Callable[..., Any] | None, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an operator's result as it was before :func:`_wrap`."""
    if handler is not None:
        return handler(function, args, kwargs)
    with handled_by_torch(function):
        return function(*args, **kwargs)


def _take(usual: Usual, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the views of a DTensor, and note the source of those that are copies."""
    whole = args[0]
    if is_copy := hasattr(whole, "source_of_slice"):
        _read(whole)
    result = usual(function, args, kwargs)
    views = result if isinstance(result, (list, tuple)) else (result,)
    for index, view in enumerate(views):
        if is_copy or _is_joined(whole, view):

            def take(x: Any, index: int = index) -> Any:
                taken = function(x, *args[1:], **kwargs)
                return taken[index] if isinstance(taken, (list, tuple)) else taken

            view.source_of_slice = SliceSource(whole, take, _version(whole))
            _follow_slices()
    return result


def _is_joined(whole: DTensor, view: DTensor) -> bool:
    """Return whether ranks have joined their parts of the tensor for this view, which is a copy then."""
    pairs = zip(whole.placements, view.placements, strict=True)
    return any(new.is_replicate() and not old.is_replicate() for old, new in pairs)


def _write(usual: Usual, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an in-place operator, and give what it has written into copied slices to their sources."""
    written = [value for name, value in kwargs.items() if name == "out"] or args[0]
    slices = [x for x in pytree.tree_leaves(written) if hasattr(x, "source_of_slice")]
    with _WRITES if slices else nullcontext():
        for x in slices:
            _read(x)
        result = usual(function, args, kwargs)
        for x in slices:
            _write_back(x)
    return result


def _fill(usual: Usual, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fill with a number, as ``x[0] = 1.0`` does; torch has no strategy for numbers that are tensors."""
    x, value = args
    return usual(function, args, kwargs) if isinstance(value, DTensor) else x.fill_(value.item())


def _read(x: DTensor) -> None:
    """Give a slice the present values of its source."""
    source: SliceSource = x.source_of_slice  # type: ignore[attr-defined]
    if source.version != _version(source.whole):
        local_tensor(x).copy_(local_tensor(source.take(source.whole).redistribute(placements=x.placements)))
        source.version = _version(source.whole)


def _write_back(x: DTensor) -> None:
    source: SliceSource = x.source_of_slice  # type: ignore[attr-defined]
    values = _whole(source.whole).clone()
    source.take(values).copy_(_whole(x))
    local_tensor(source.whole).copy_(part_like(source.whole, values))
    if hasattr(source.whole, "source_of_slice"):
        _write_back(source.whole)


def _whole(x: DTensor) -> Tensor:
    return local_tensor(x.redistribute(placements=[Replicate()] * x.device_mesh.ndim))


def _version(x: DTensor) -> int:
    return 0 if x.is_inference() else version(x)
