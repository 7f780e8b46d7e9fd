"""``torch.cond``, ``scan``, ``map`` and ``while_loop`` in forward, as plain operators of the trace.

Both branches are computed, and the predicate chooses each result: it is a value as any other, so that it is the same on
all ranks. What a branch reads has no gradient where the other one is chosen, so that a value of it that is no number
(the logarithm of a negative one) never reaches a gradient. Loops are as many operators as they have rounds, if a trace
knows how many; a map over rows of the batch is a ``vmap``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat.torch import NEEDS_VALUES, pytree, recording
from ..compat.torch_control_flow import control_flow_by
from ..core.errors import CompileError, Where
from ..core.replaced import for_this_thread
from .flex.followed import flex_attention_followed
from .flex.packed import varlen_attention_followed
from .places import OWN
from .watched_trace import user_line


@contextlib.contextmanager
def control_flow_followed() -> Iterator[None]:
    """While inside, operators that take functions and that a traced forward calls become plain operators.

    Raises:
        CompileError: QN105 for others than those of this module, for a scan over a number of rows that varies, and for
            a loop whose number of rounds depends on the batch, parameters or buffers; see :mod:`.flex.followed` and
            :mod:`.flex.packed`.
    """
    with control_flow_by(_run, for_this_thread), flex_attention_followed(), varlen_attention_followed():
        yield


def _run(name: str, arguments: Sequence[Any], theirs: Callable[[], Any]) -> Any:
    if not recording():
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
        one, form = pytree.tree_flatten(yes(*operands))
    with _Only(chosen.logical_not()):
        other, also = pytree.tree_flatten(no(*operands))
    if form != also or any(map(_differs, one, other)):
        raise _refusal("a torch.cond whose branches return values of other shapes or dtypes", "return the same kind")
    both = zip(one, other, strict=True)
    return pytree.tree_unflatten([torch.where(chosen, a, b) if isinstance(a, Tensor) else a for a, b in both], form)


def _differs(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is not b and a != b
    return a.dtype is not b.dtype or tuple(a.shape) != tuple(b.shape)


def _unrolled(step: Callable[..., Any], carry: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    length = given[0].shape[0]
    if not isinstance(length, int):
        raise _refusal("a scan over the rows of the batch", "scan over a dim whose size is fixed, or use cumsum")
    held: Any = carry
    made = []
    for i in range(length):
        held, out = step(*pytree.tree_leaves(held), *(x.select(0, i) for x in given))
        made.append(out)
    return held, pytree.tree_map(lambda *parts: torch.stack(parts), *made)


def _mapped(function: Callable[..., Any], given: Sequence[Tensor], others: Sequence[Any]) -> Any:
    length = given[0].shape[0]
    if not isinstance(length, int):
        return torch.vmap(function, in_dims=(0,) * len(given) + (None,) * len(others))(*given, *others)
    made = [function(*(x.select(0, i) for x in given), *others) for i in range(length)]
    return pytree.tree_map(lambda *parts: torch.stack(parts), *made)


def _rounds(
    goes_on: Callable[..., Any], step: Callable[..., Any], carry: Sequence[Any], others: Sequence[Any]
) -> tuple[Any, ...]:
    held = tuple(carry)
    while True:
        try:
            again = bool(goes_on(*held, *others))
        except NEEDS_VALUES as error:
            what = "a while_loop whose number of rounds depends on values of the batch, of parameters or of buffers"
            raise _refusal(what, "let a number that forward makes count a fixed number of rounds") from error
        if not again:
            return tuple(x.clone() if isinstance(x, Tensor) else x for x in held)
        held = tuple(step(*held, *others))


class _Only(TorchFunctionMode):
    """While inside, what was computed before gets a gradient only where ``chosen``."""

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.read: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: dict[int, Tensor] = {id(chosen): chosen}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._read, (args, kwargs or {}))
        found = func(*args, **kwargs)
        self.made.update((id(x), x) for x in pytree.tree_leaves(found) if isinstance(x, Tensor))
        return found

    def _read(self, x: Tensor) -> Tensor:
        if id(x) in self.made or not x.requires_grad:
            return x
        if id(x) not in self.read:
            gated = torch.where(self.chosen, x, x.detach())
            self.read[id(x)] = x, gated
            self.made[id(gated)] = gated
        return self.read[id(x)][1]


def _refusal(what: str, fix: str) -> CompileError:
    where = Where("", user_line(sys._getframe(2), OWN))
    return CompileError("QN105", f"{what} would not be part of the program", where=where, fix=fix)
