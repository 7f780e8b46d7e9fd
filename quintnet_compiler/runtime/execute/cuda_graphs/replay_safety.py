"""Observe a segment's operators once, to decide whether a replay would compute the same, and whether it pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....compat.torch import TorchDispatchMode, pytree, schema


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes the operators that run on ``inputs``.

    Seeds, steps and loss scales are behind calls of ``comm``, which no segment contains.

    Attributes:
        operators: the number of operators that compute something, other than views.
        reason: why a replay would not compute the same; None if it does.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        """Remember the memory of the inputs, into which a replay must not write."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.homes = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
        self.operators = 0
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Count an operator, and check whether it may be replayed."""
        values = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | (kwargs or {})
        self.operators += all(result.alias_info is None for result in schema(func).returns)
        self.reason = self.reason or self._illegal(func, values)
        return func(*args, **(kwargs or {}))

    def _illegal(self, func: Any, values: dict[str, Any]) -> str | None:
        if torch.Tag.nondeterministic_seeded in func.tags and values.get("dropout_p", 0.0 if _drops(func) else 1.0):
            return f"{func} draws random numbers"
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return f"the host must know the result of {func}, or its size"
        if func is torch.ops.aten._to_copy.default and _leaves(values["self"], values.get("device")):
            return f"the host reads the result of {func}"
        written = [a.name for a in schema(func).arguments if a.alias_info is not None and a.alias_info.is_write]
        for x in pytree.tree_leaves([values.get(name) for name in written]):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.homes:
                return f"{func} writes into an input"
        return None


def _drops(func: Any) -> bool:
    return any(argument.name == "dropout_p" for argument in schema(func).arguments)


def _leaves(x: Tensor, to: torch.device | str | None) -> bool:
    """Return whether a copy goes from a device to the host."""
    return to is not None and torch.device(to).type == "cpu" and x.device.type != "cpu"
