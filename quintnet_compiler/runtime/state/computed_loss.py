"""The loss that a step returns: a scalar whose gradients are already computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import plain_function
from ...core.errors import RunError

# functions whose result is a SettledLoss, too
_SCALING = frozenset(("mul", "div", "true_divide", "add", "sub", "rsub", "__rdiv__", "mean", "sum"))
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class SettledLoss(Tensor):
    """A scalar tensor on which backward is refused, also after scaling it as GradScaler does.

    Raises:
        RunError: QN113 by ``backward``.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD:
            raise RunError(
                "QN113",
                "backward was called on the loss that step returned, and step computed the gradients",
                fix="leave backward (and GradScaler) out: program.step(batch), then optimizer.step()",
            )
        result = plain_function(func, types, args, kwargs or {})
        return result.as_subclass(cls) if isinstance(result, Tensor) and func.__name__ in _SCALING else result

    @property
    def plain(self) -> Tensor:
        """Return the loss as a torch.Tensor."""
        return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain.clone()
