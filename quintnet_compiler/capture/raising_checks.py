"""``if bad: raise``: where a condition on the values of tensors decides only whether an error is raised.

A program computes, and does not check: such a condition has the value for which nothing is raised, as assertions are
dropped (:data:`..compat.torch.EXPORT_CHECKS`). The first batch is compared with the module itself, which raises.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

from torch import Tensor

from ..core.replaced import for_this_thread

_ASKS = ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE")
_RAISES = ("RAISE_VARARGS", "RERAISE")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE")
# What Python itself catches, in loops, getattr and the like: the errors, and the methods that it calls so.
_CAUGHT = ("StopIteration", "StopAsyncIteration", "AttributeError", "GeneratorExit")
_PLAIN = ("__call__", "__init__", "__post_init__")


@contextlib.contextmanager
def checks_pass(known: Callable[[Tensor], bool], own: tuple[str, ...]) -> Iterator[None]:
    """While inside, such conditions pass, of tensors that are not ``known``: that only stand for values in a trace.
    ``own``: folders of code that is not the user's."""
    before, top = Tensor.__bool__, sys._getframe(2)

    def truth(x: Tensor) -> bool:
        found = None if known(x) else passing(sys._getframe(2), top, own)
        return before(x) if found is None else found

    with mock.patch.object(Tensor, "__bool__", for_this_thread(truth, before)):
        yield


def passing(frame: types.FrameType, top: types.FrameType, own: tuple[str, ...]) -> bool | None:
    """The truth of the condition that ``frame`` is about to ask for, for which it goes on, where the other one surely
    ends in ``raise``; None where both go on, or where ``frame`` or code between it and ``top``, outside of the folders
    ``own``, may catch what is raised.
    """
    if _catches(frame):
        return None
    steps = _steps(frame.f_code)
    at, wanted = frame.f_lasti, True
    while steps[at].opname in ("TO_BOOL", "UNARY_NOT"):
        wanted = wanted is not (steps[at].opname == "UNARY_NOT")
        at = _next(steps, at)
    step = steps[at]
    if step.opname not in _ASKS:
        return None
    jumps, goes_on = (_raises(steps, start) for start in (step.argval, _next(steps, at)))
    if jumps is goes_on:
        return None
    caller = frame.f_back if frame is not top else None
    while caller is not None and caller is not top:
        if not caller.f_code.co_filename.startswith(own) and _catches(caller):
            return None
        caller = caller.f_back
    return (step.opname.endswith("TRUE") is not jumps) is wanted


def _steps(code: types.CodeType) -> Mapping[int, dis.Instruction]:
    return {step.offset: step for step in dis.get_instructions(code)}


def _next(steps: Mapping[int, dis.Instruction], at: int) -> int:
    return next((offset for offset in steps if offset > at), at)


def _catches(frame: types.FrameType) -> bool:
    """Whether what is raised here may be caught in this function, which is inside ``try`` or ``with``, or by Python,
    which calls a method such as ``__getitem__``."""
    name = frame.f_code.co_name
    if name.startswith("__") and name.endswith("__") and name not in _PLAIN:
        return True
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)


def _raises(steps: Mapping[int, dis.Instruction], at: int, seen: frozenset[int] = frozenset()) -> bool:
    """Whether every path from ``at`` on ends in ``raise``, of what Python does not catch."""
    while at not in seen:
        seen |= {at}
        step = steps[at]
        if step.argval in _CAUGHT:
            return False
        if step.opname in _RAISES:
            return True
        if step.opname in _ENDS or step.opname == "FOR_ITER":
            return False
        if "JUMP" in step.opname:
            if "IF" in step.opname and not _raises(steps, _next(steps, at), seen):
                return False
            at = step.argval
        else:
            at = _next(steps, at)
    return False
