"""The loss that a step returns: a scalar whose gradients are already computed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.torch import plain_function
from ...core.errors import RunError

# functions whose result is a SettledLoss, too
_SCALING = frozenset(("mul", "div", "true_divide", "add", "sub", "rsub", "__rdiv__", "mean", "sum"))
_SCALERS = ("torch.amp.grad_scaler", "torch.distributed.fsdp.sharded_grad_scaler")  # modules
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _is_called_by_grad_scaler() -> bool:
    """Return whether the function of torch that runs now was called in the module of a GradScaler."""
    caller = sys._getframe(2)  # of __torch_function__
    return caller.f_globals.get("__name__") in _SCALERS


class SettledLoss(Tensor):
    """A scalar tensor on which backward is refused, also after scaling it, and GradScaler's ``scale``.

    A scaler would divide gradients by a factor that they do not have.

    Raises:
        RunError: QN113 by ``backward`` and by ``GradScaler.scale``.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BACKWARD or _is_called_by_grad_scaler():
            what = "backward was called on" if func in _BACKWARD else "a GradScaler scales"
            raise RunError(
                "QN113",
                f"{what} the loss that step returned, and step computed the gradients",
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
