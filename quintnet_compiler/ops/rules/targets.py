"""The operator that a user means by a name, by a packet of overloads, or by the object that made it."""

from __future__ import annotations

from typing import Any

import torch

from ...compat.torch import OpOverload, OpOverloadPacket, custom_operator
from ..functional_forms import functional_form, writes_arguments


def operator_of(target: Any) -> Any:
    """Return the operator that a graph has for ``target``: of one that writes to its arguments the functional form.

    Args:
        target: an operator (``torch.ops.lib.op.default``), the packet of its only overload (``torch.ops.lib.op``), its
            name (``"lib::op"`` or ``"lib::op.default"``), or what ``torch.library.custom_op`` or ``triton_op`` returns.
            Anything else is returned as it is.

    Raises:
        ValueError: if a packet has several overloads, or there is no operator of that name.
    """
    if isinstance(target, OpOverload):
        return functional_form(target) if writes_arguments(target) else target
    if isinstance(target, str) and "::" in target:
        return _named(target)
    if isinstance(target, OpOverloadPacket):
        return _only_overload(target)
    custom = custom_operator(target)
    return target if custom is None else operator_of(custom)


def _named(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    operator = getattr(getattr(torch.ops, namespace), packet, None)
    if operator is not None and overload:
        operator = getattr(operator, overload, None)
    if operator is None:
        raise ValueError(f"there is no operator {name!r}: define it (or import what does) before its rule")
    return operator_of(operator)


def _only_overload(packet: Any) -> Any:
    names = packet.overloads()
    if len(names) != 1:
        raise ValueError(f"{packet} has the overloads {', '.join(names)}: name one of them, {packet}.{names[0]}")
    return operator_of(getattr(packet, names[0]))
