"""Parameters without memory, which replace a module's own while it is traced.

Tracing needs shapes, strides, dtypes and devices, and no values. The parameters themselves may be DTensors, or have no
memory because other ranks hold them. Tracing also keeps weak references to tensors, which would forbid to change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..compat.torch_codegen import SHIPPED
from .errors import CompileError

_OWNER_DEVICE = "_quintnet_elsewhere"  # attribute of a parameter that other ranks hold


def of_other_ranks(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Mark a parameter on the meta device as held by other ranks, on devices of the kind of ``device``."""
    parameter.__dict__[_OWNER_DEVICE] = device
    return parameter


def is_of_other_ranks(parameter: nn.Parameter) -> bool:
    """Return whether :func:`of_other_ranks` marked a parameter."""
    return _OWNER_DEVICE in parameter.__dict__


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a module's parameters.

    It is the meta device only if all of them are on it, and no other rank holds any.
    """
    devices = [p.__dict__.get(_OWNER_DEVICE, p.device) for p in model.parameters()]
    return next((d for d in devices if d.type != "meta"), devices[0] if devices else torch.device("cpu"))


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters and buffers that have no shape yet: a program needs all shapes before it runs.

    Raises:
        CompileError: QN101 with their names.
    """
    lazy = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if is_lazy(x)]
    if lazy:
        more = f" and {len(lazy) - 3} more" if len(lazy) > 3 else ""
        raise CompileError(
            "QN101",
            f"lazy modules have no shapes yet: {', '.join(lazy[:3])}{more}",
            fix="run one forward first, as in `with torch.no_grad(): model.eval()(*batch)`, and then model.train()",
        )


@contextlib.contextmanager
def hollow_parameters(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Replace every parameter by a plain one of the same shape without memory, while inside.

    So are buffers on the meta device if parameters are on another. Ties stay ties.

    Yields:
        The original tensor, by the id of its replacement.
    """
    originals: dict[int, Tensor] = {}
    replacements: dict[int, Tensor] = {}
    changes: list[tuple[nn.Module, str, Tensor]] = []
    device = device_of(model)
    try:
        for module in model.modules():
            for name, x in [*module._parameters.items(), *module._buffers.items()]:
                replaced = isinstance(x, nn.Parameter) or (x is not None and x.is_meta and device.type != "meta")
                if x is None or id(x) in originals or not replaced:
                    continue
                if id(x) not in replacements:
                    replacements[id(x)] = _hollow(x, device if x.is_meta else x.device)
                    originals[id(replacements[id(x)])] = x
                changes.append((module, name, x))
                setattr(module, name, replacements[id(x)])
        yield originals
    finally:
        for module, name, x in changes:
            setattr(module, name, x)


@contextlib.contextmanager
def plain_parameters(loss_parts: Iterable[nn.Module | nn.Parameter]) -> Iterator[None]:
    """Give the parameters of a loss function the class that tracing knows, while inside.

    A program that trains them may have given them another class.
    """
    classes: dict[int, tuple[nn.Parameter, type[nn.Parameter]]] = {}
    for part in loss_parts:
        for x in part.parameters() if isinstance(part, nn.Module) else [part]:
            if type(x) is not nn.Parameter and type(x).__bases__ == (nn.Parameter,):
                classes[id(x)] = x, type(x)
    try:
        for x, _ in classes.values():
            x.__class__ = nn.Parameter
        yield
    finally:
        for x, original_class in classes.values():
            x.__class__ = original_class


def _hollow(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like ``x`` without memory."""
    empty = SHIPPED.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if device.type != "meta":
        empty.untyped_storage().resize_(0)
    if not isinstance(x, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=x.requires_grad)
    parameter.__dict__.update(x.__dict__)
    return parameter
