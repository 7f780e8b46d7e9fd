"""Parameters without memory, which stand for a module's own while it is traced.

Tracing needs shapes, strides, dtypes and devices, and no values. The parameters themselves may be DTensors, or without
memory because other ranks hold them; and what tracing keeps of a tensor (weak references) would forbid to change them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import CompileError

_ELSEWHERE = "_quintnet_elsewhere"


def of_other_ranks(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Mark one on the meta device as that of other ranks, whose devices are like ``device`` of this one."""
    parameter.__dict__[_ELSEWHERE] = device
    return parameter


def is_of_other_ranks(parameter: nn.Parameter) -> bool:
    """Whether :func:`of_other_ranks` has marked it."""
    return _ELSEWHERE in parameter.__dict__


def device_of(model: nn.Module) -> torch.device:
    """Where a module's parameters are: on the meta device only if all of them are, and no other rank has them."""
    devices = [p.__dict__.get(_ELSEWHERE, p.device) for p in model.parameters()]
    return next((d for d in devices if d.type != "meta"), devices[0] if devices else torch.device("cpu"))


def check_shapes(model: nn.Module) -> None:
    """Refuse parameters and buffers that have no shape yet: what a program is made of is known before it runs.

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
    """While inside, every parameter is a plain one of the same shape, without memory; so is a buffer on the meta device
    if parameters are elsewhere.

    Yields: id of what stands for a tensor -> that tensor. Ties stay ties.
    """
    real: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    changed: list[tuple[nn.Module, str, Tensor]] = []
    device = device_of(model)
    try:
        for module in model.modules():
            for name, x in [*module._parameters.items(), *module._buffers.items()]:
                stands = isinstance(x, nn.Parameter) or (x is not None and x.is_meta and device.type != "meta")
                if x is None or id(x) in real or not stands:
                    continue
                if id(x) not in made:
                    made[id(x)] = _hollow(x, device if x.is_meta else x.device)
                    real[id(made[id(x)])] = x
                changed.append((module, name, x))
                setattr(module, name, made[id(x)])
        yield real
    finally:
        for module, name, x in changed:
            setattr(module, name, x)


@contextlib.contextmanager
def plain_parameters(found: Iterable[nn.Module | nn.Parameter]) -> Iterator[None]:
    """While inside, the parameters that a loss function brings are of the class that tracing knows, also those to which
    a program that trains them gave another one."""
    each = [x for one in found for x in (one.parameters() if isinstance(one, nn.Module) else [one])]
    kinds = {id(x): (x, type(x)) for x in each if type(x) is not nn.Parameter and type(x).__bases__ == (nn.Parameter,)}
    try:
        for x, _ in kinds.values():
            x.__class__ = nn.Parameter
        yield
    finally:
        for x, kind in kinds.values():
            x.__class__ = kind


def _hollow(x: Tensor, device: torch.device) -> Tensor:
    found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if device.type != "meta":
        found.untyped_storage().resize_(0)
    if not isinstance(x, nn.Parameter):
        return found
    parameter = nn.Parameter(found, requires_grad=x.requires_grad)
    parameter.__dict__.update(x.__dict__)
    return parameter
