"""What operators a segment runs, seen once: whether a replay of them does the same, and whether it is worth it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import TorchDispatchMode, pytree, schema


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what runs on ``inputs``. ``operators``: how many make something, rather than a view of what is there;
    ``reason``: why a replay would not do the same, None if it does. Seeds, steps and scales are behind calls of
    ``comm``, which no segment has."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.homes = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
        self.operators = 0
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        known = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | (kwargs or {})
        self.operators += all(made.alias_info is None for made in schema(func).returns)
        self.reason = self.reason or self._illegal(func, known)
        return func(*args, **(kwargs or {}))

    def _illegal(self, func: Any, known: dict[str, Any]) -> str | None:
        if torch.Tag.nondeterministic_seeded in func.tags and known.get("dropout_p", 0.0 if _drops(func) else 1.0):
            return f"{func} draws random numbers"
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return f"what {func} makes, or how much, is for the host to know"
        if func is torch.ops.aten._to_copy.default and _leaves(known["self"], known.get("device")):
            return f"what {func} makes is for the host to read"
        written = [a.name for a in schema(func).arguments if a.alias_info is not None and a.alias_info.is_write]
        for x in pytree.tree_leaves([known.get(name) for name in written]):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.homes:
                return f"{func} writes into an input"
        return None


def _drops(func: Any) -> bool:
    return any(argument.name == "dropout_p" for argument in schema(func).arguments)


def _leaves(x: Tensor, to: torch.device | str | None) -> bool:
    """Whether a copy leaves a device for the host."""
    return to is not None and torch.device(to).type == "cpu" and x.device.type != "cpu"
