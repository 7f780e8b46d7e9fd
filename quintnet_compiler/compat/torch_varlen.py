"""Private names of torch: ``torch.nn.attention.varlen``, whose function calls an operator that only CUDA has."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = [
    "VarlenCall",  # what a model asks of varlen_attn
    "varlen_attention_by",
]

_VARLEN = "torch.nn.attention.varlen"


@dataclass(frozen=True)
class VarlenCall:
    """A call of ``varlen_attn``.

    Attributes:
        q, k, v: queries [S, H, D], keys [T, G, D] and values [T, G, E].
        q_ends, k_ends: ends of the documents among queries and keys, after a 0.
        scale: of the scores; None: 1 / sqrt(D).
        left, right: how many keys before and after its own position a query sees; -1: all.
        more: the name of another option that the call sets; None if there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_ends: Tensor
    k_ends: Tensor
    scale: float | None
    left: int
    right: int
    more: str | None


@contextlib.contextmanager
def varlen_attention_by(run: Callable[[VarlenCall, Callable[[], Any]], Any], replace: Any) -> Iterator[None]:
    """Inside, what ``varlen_attn`` computes is ``run(call, theirs)``; ``theirs``: what torch would do.
    ``replace(ours, theirs)`` is what the process calls meanwhile. Instead: a function of our own in its place, which a
    model that imported it before would not call.
    """
    module: Any = sys.modules.get(_VARLEN)
    if module is None:  # no model uses it
        yield
        return
    operators: Any = torch.ops.torch_attn
    theirs = operators._varlen_attn

    def ours(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, *rest: Any) -> tuple[Any, ...]:
        _, _, causal, scale, window, *added = rest
        left, right = window or (-1, -1)
        caches = zip(("seqused_k", "block_table"), added[1:], strict=False)  # behind enable_gqa; not in PyTorch 2.11
        asked = [name for name, cache in caches if cache is not None]
        asked += ["return_aux"] if _logs_asked(inspect.currentframe(), module.varlen_attn.__code__) else []
        call = VarlenCall(q, k, v, q_ends, k_ends, scale, left, 0 if causal else right, next(iter(asked), None))
        output = run(call, lambda: theirs(q, k, v, q_ends, k_ends, *rest))
        return output if isinstance(output, tuple) else (output, None, None)

    with mock.patch.object(operators, "_varlen_attn", _Called(theirs, replace(ours, theirs))):
        yield


class _Called:
    """An operator whose call is another function: torch goes through the operators of a namespace meanwhile."""

    def __init__(self, operator: Any, call: Callable[..., Any]) -> None:
        self.operator, self.call = operator, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)


def _logs_asked(frame: FrameType | None, function: Any) -> bool:
    """Return whether the call of ``function`` that led to ``frame`` asks for logs of sums of exponentials."""
    while frame is not None and frame.f_code is not function:
        frame = frame.f_back
    asked = None if frame is None else frame.f_locals.get("return_aux")
    return bool(asked is not None and asked.lse)
