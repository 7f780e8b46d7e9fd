"""Trace past ``if bad: raise``, a condition on the values of tensors that decides only whether an error is raised.

A program computes and does not check: such a condition gets the value for which nothing is raised, as assertions are
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
# Errors that Python itself catches, in loops, getattr and the like; of special methods, only these do not return to it.
_CAUGHT = ("StopIteration", "StopAsyncIteration", "AttributeError", "GeneratorExit")
_PLAIN = ("__call__", "__init__", "__post_init__")


@contextlib.contextmanager
def checks_pass(has_value: Callable[[Tensor], bool], own: tuple[str, ...]) -> Iterator[None]:
    """Let such conditions pass inside, for tensors that only stand for values in a trace.

    ``has_value``: returns whether a tensor does not. ``own``: folders of code that is not the user's.
    """
    original, top = Tensor.__bool__, sys._getframe(2)

    def truth(x: Tensor) -> bool:
        result = None if has_value(x) else passing(sys._getframe(2), top, own)
        return original(x) if result is None else result

    with mock.patch.object(Tensor, "__bool__", for_this_thread(truth, original)):
        yield


def passing(frame: types.FrameType, top: types.FrameType, own: tuple[str, ...]) -> bool | None:
    """Return the truth value with which ``frame`` continues, if the other one certainly ends in ``raise``.

    None if both continue, or if ``frame`` or code between it and ``top``, outside of the folders ``own``, may catch the
    error.
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
    """Return whether an error may be caught: in ``try`` or ``with``, or in a special method, which Python calls."""
    name = frame.f_code.co_name
    if name.startswith("__") and name.endswith("__") and name not in _PLAIN:
        return True
    entries = dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)


def _raises(steps: Mapping[int, dis.Instruction], at: int, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether every path from ``at`` ends in ``raise`` of an error that Python does not catch."""
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
