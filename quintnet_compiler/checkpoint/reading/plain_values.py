"""Values that a file of anyone may have, compared with the values that they are to replace: their kinds, and ranges."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...weights.files import shown

_TORCH_OPTIMIZERS = "torch.optim."
_DEEPEST = 20  # containers in one another
KERNELS = ("fused", "foreach", "capturable", "differentiable")  # options that change no shape: a bool, or None


class _MisfitError(Exception):
    """Say which field has which wrong value."""


def require_alike(values: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    """Compare plain values with those that they are to replace.

    A number takes the place of a number, a list that of a list of any length or of a tuple of the same length. Names
    that ``own`` does not have may have any number, text, or list of them.

    Args:
        values: of a file.
        own: those that are there, tensors among them.
        where: names the file and the part of it.

    Raises:
        CheckpointError: QN602, naming the field.
    """
    try:
        for name, value in values.items():
            _require_value(value, own.get(name), f"{where}.{name}", 0)
    except _MisfitError as misfit:
        raise CheckpointError("QN602", str(misfit), fix="load a checkpoint that has not been changed") from None


def require_options(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Refuse options that a group of an optimizer cannot have; torch's own optimizers say which ones that are.

    Raises:
        CheckpointError: QN602, naming the option.
    """
    where, kind = "state.json: optimizer.options", type(optimizer)
    own = {name: value for name, value in group.items() if name != "params"}
    if "params" in options or ("lr" in own and options.get("lr") is None):
        text = f"{where}.params is no option" if "params" in options else f"{where}.lr is missing"
        raise CheckpointError("QN602", text, fix="load a checkpoint that has not been changed")
    require_alike(options, own, where)
    if not is_of_torch(optimizer):
        return
    wrong = [name for name, x in options.items() if _is_endless(x, own.get(name)) or _is_no_switch(name, x)]
    if wrong:
        text = f"{where}.{shown(wrong[0])} is {shown(repr(options[wrong[0]]))}"
        raise CheckpointError("QN602", text, fix="load a checkpoint that has not been changed")
    make: Callable[..., object] = kind
    try:
        make([torch.zeros(1, 1, requires_grad=True)], **arguments_of(kind, options, own))
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        text = f"{where}: {kind.__name__} refuses them: {shown(str(error))}"
        raise CheckpointError("QN602", text, fix="load a checkpoint that has not been changed") from None


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class is one of torch's own."""
    return _is_of_torch(type(optimizer))


def class_of_updates(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return torch's own class whose update an optimizer makes; None if its class, or one between, has a method."""
    for kind in type(optimizer).__mro__:
        if _is_of_torch(kind):
            return kind if kind is not torch.optim.Optimizer else None
        if any(not _is_of_torch(inspect.unwrap(method)) for method in _methods(kind)):
            return None
    return None


def _is_of_torch(kind: object) -> bool:
    return f"{getattr(kind, '__module__', '')}.".startswith(_TORCH_OPTIMIZERS)


def _methods(kind: type) -> list[Callable[..., object]]:
    """Return the methods that a class adds, but for ``__init__``, and a step that it inherits and torch has wrapped."""
    values = ((name, getattr(value, "fget", value)) for name, value in vars(kind).items() if name != "__init__")
    return [getattr(value, "__func__", value) for name, value in values if callable(value) or name == "step"]


def arguments_of(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an optimizer's class that are among a group's ``options``, which JSON has as lists."""
    names = inspect.signature(kind).parameters.keys() & options.keys()
    return {name: tuple(options[name]) if isinstance(group.get(name), tuple) else options[name] for name in names}


def _require_value(value: Any, own: Any, where: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise _MisfitError(f"{where} has lists in lists, {depth} deep")
    if isinstance(own, np.generic):
        own = own.item()
    if isinstance(value, list | tuple | Mapping):
        for name, part, its_own in _parts(value, own, where):
            _require_value(part, its_own, f"{where}.{shown(name)}", depth + 1)
    elif isinstance(value, float | int) and not isinstance(value, bool):
        _require_number(value, own, where)
    elif value is not None and own is not None and type(value) is not type(own):
        raise _misfit(value, own, where)


def _parts(value: Any, own: Any, where: str) -> list[tuple[str, Any, Any]]:
    """Return the names and the parts of a list or dict, each with the one that it is to replace, or None."""
    if isinstance(value, Mapping):
        if own is not None and not isinstance(own, Mapping):
            raise _misfit(value, own, where)
        return [(str(name), part, (own or {}).get(name)) for name, part in value.items()]
    if own is not None and not isinstance(own, list | tuple):
        raise _misfit(value, own, where)
    if isinstance(own, tuple) and len(value) != len(own):
        raise _misfit(value, own, where)
    replaced = list(own or ()) + [None] * len(value)
    return [(str(i), part, its_own) for i, (part, its_own) in enumerate(zip(value, replaced, strict=False))]


def _require_number(value: float, own: Any, where: str) -> None:
    if own is not None and (isinstance(own, bool) or not isinstance(own, float | int | Tensor)):
        raise _misfit(value, own, where)
    try:
        number = float(value)
    except OverflowError:
        raise _MisfitError(f"{where} is a number of {len(str(abs(value)))} digits") from None
    if math.isnan(number) and not _is_nan(own):
        raise _MisfitError(f"{where} is not a number")


def _is_endless(value: Any, own: Any) -> bool:
    """Return whether an infinite number would replace a finite one."""
    return isinstance(value, float) and math.isinf(value) and isinstance(own, float | int) and math.isfinite(own)


def _is_no_switch(name: str, value: Any) -> bool:
    return name in KERNELS and value is not None and not isinstance(value, bool)


def _is_nan(own: Any) -> bool:
    return isinstance(own, float) and math.isnan(own)


def _misfit(value: Any, own: Any, where: str) -> _MisfitError:
    size = f" of {len(own)}" if isinstance(own, list | tuple) else ""
    return _MisfitError(f"{where} is {shown(repr(value))}, and a {type(own).__name__}{size} here")
