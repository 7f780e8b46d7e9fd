"""``torch.cond``, ``scan``, ``map`` and ``while_loop`` in forward, as plain operators of the trace.

Both branches are computed, and the predicate, which is the same on all ranks, selects each result. Inputs of a branch
get no gradient where the other branch is selected, so that a NaN in it (the logarithm of a negative number) never
reaches a gradient. Loops are unrolled if a trace knows the number of rounds; a map over rows of the batch is a
``vmap``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.torch import is_recording, needs_values, pytree
from ..compat.torch_control_flow import control_flow_by
from ..core.errors import CompileError, Where
from ..core.replaced import for_this_thread
from .changes.user_frames import user_line
from .flex.followed import flex_attention_followed
from .flex.packed import varlen_attention_followed
from .places import OWN


@contextlib.contextmanager
def control_flow_followed() -> Iterator[None]:
    """Let operators that take functions become plain operators of a trace inside.

    Raises:
        CompileError: QN105 for others than those of this module, for a scan over a number of rows that varies, and for
            a loop whose number of rounds depends on the batch, parameters or buffers; see :mod:`.flex.followed` and
            :mod:`.flex.packed`.
    """
    with control_flow_by(_run, for_this_thread), flex_attention_followed(), varlen_attention_followed():
        yield


def _run(name: str, arguments: Sequence[Any], theirs: Callable[[], Any]) -> Any:
    if not is_recording():
        return theirs()
    if name == "cond":
        return _either(*arguments)
    if name == "scan":
        return _unrolled(*arguments)
    if name == "map":
        return _mapped(*arguments)
    if name == "while_loop":
        return _rounds(*arguments)
    raise _refusal(f"the operator {name}, which takes functions", "write the loop in Python, with a number of rounds")


def _either(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Any]) -> Any:
    if not isinstance(predicate, Tensor):
        return (yes if predicate else no)(*operands)
    chosen = predicate.reshape(())
    with _Only(chosen):
        results, form = pytree.tree_flatten(yes(*operands))
    with _Only(chosen.logical_not()):
        other, also = pytree.tree_flatten(no(*operands))
    if form != also or any(map(_differs, results, other)):
        raise _refusal("a torch.cond whose branches return values of other shapes or dtypes", "return the same kind")
    pairs = zip(results, other, strict=True)
    return pytree.tree_unflatten([torch.where(chosen, a, b) if isinstance(a, Tensor) else a for a, b in pairs], form)


def _differs(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is not b and a != b
    return a.dtype is not b.dtype or tuple(a.shape) != tuple(b.shape)


def _unrolled(step: Callable[..., Any], carry: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    length = inputs[0].shape[0]
    if not isinstance(length, int):
        raise _refusal("a scan over the rows of the batch", "scan over a dim whose size is fixed, or use cumsum")
    held: Any = carry
    outs = []
    for i in range(length):
        held, out = step(*pytree.tree_leaves(held), *(x.select(0, i) for x in inputs))
        outs.append(out)
    return held, pytree.tree_map(lambda *parts: torch.stack(parts), *outs)


def _mapped(function: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Any]) -> Any:
    length = inputs[0].shape[0]
    if not isinstance(length, int):
        return torch.vmap(function, in_dims=(0,) * len(inputs) + (None,) * len(others))(*inputs, *others)
    results = [function(*(x.select(0, i) for x in inputs), *others) for i in range(length)]
    return pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def _rounds(
    goes_on: Callable[..., Any], step: Callable[..., Any], carry: Sequence[Any], others: Sequence[Any]
) -> tuple[Any, ...]:
    held = tuple(carry)
    while True:
        try:
            again = bool(goes_on(*held, *others))
        except needs_values() as error:
            message = "a while_loop whose number of rounds depends on values of the batch, of parameters or of buffers"
            raise _refusal(message, "let a number that forward makes count a fixed number of rounds") from error
        if not again:
            return tuple(x.clone() if isinstance(x, Tensor) else x for x in held)
        held = tuple(step(*held, *others))


class _Only(TorchFunctionMode):
    """A mode in which tensors from outside get a gradient only where ``chosen``."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.read: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {id(chosen): chosen}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._read, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self.made.update((id(x), x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        return result

    def _read(self, x: Tensor) -> Tensor:
        if id(x) in self.made or not x.requires_grad:
            return x
        if id(x) not in self.read:
            gated = torch.where(self.chosen, x, x.detach())
            self.read[id(x)] = x, gated
            self.made[id(gated)] = gated
        return self.read[id(x)][1]


def _refusal(construct: str, fix: str) -> CompileError:
    where = Where("", user_line(sys._getframe(2), OWN))
    return CompileError("QN105", f"{construct} would not be part of the program", where=where, fix=fix)
