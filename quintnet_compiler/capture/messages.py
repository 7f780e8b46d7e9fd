"""Silence torch while it traces, as it prints whole graphs when it fails, and say what matters in an error."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch import without_printed_graphs
from ..core.errors import CompileError, QuintNetError, Where
from ..ir.batch_form import ROWS
from .places import OWN
from .raw_kernels import raw_kernel
from .step_module import StepModule

_SILENCED = (FutureWarning, DeprecationWarning)  # about torch's own calls


@dataclass(frozen=True)
class _Others(logging.Filter):
    """A filter that only lets records of other threads pass."""

    thread: int

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread


@contextlib.contextmanager
def without_messages_of_torch() -> Iterator[None]:
    """Silence torch's loggers, printed graphs and deprecation warnings in this thread inside.

    A logger of torch that was set to log more than warnings (``TORCH_LOGS``, ``set_logs``) still logs everything. The
    model's own prints, logs and warnings are not touched.
    """
    others = _Others(threading.get_ident())
    named_loggers = list(logging.root.manager.loggerDict.items())
    loggers = [x for name, x in named_loggers if isinstance(x, logging.Logger) and _usual(name, x)]
    with warnings.catch_warnings(), without_printed_graphs():
        for kind in _SILENCED:
            warnings.simplefilter("ignore", kind)
        for logger in loggers:
            logger.addFilter(others)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(others)


def _usual(name: str, logger: logging.Logger) -> bool:
    """Return whether this is one of torch's loggers, set as torch sets it."""
    return name.partition(".")[0] == "torch" and logger.getEffectiveLevel() >= logging.WARNING


def _user_frame(stack: Any) -> str:
    for frame in reversed(list(stack)):
        if not frame.filename.startswith(OWN) and not frame.filename.startswith("<"):
            line = f": {frame.line}" if frame.line else ""
            return f"{Path(frame.filename).name}:{frame.lineno}{line}"
    return ""


def with_place(error: QuintNetError) -> QuintNetError:
    """Return an error with the user's line, if it has none."""
    if not isinstance(error, CompileError) or (error.where is not None and str(error.where)):
        return error
    return CompileError(error.code, error.message, where=place_of_error(error), fix=error.fix)


def place_of_error(error: Exception) -> Where:
    """Return the innermost module of the user in which an error was raised, and the innermost line."""
    stack = traceback.extract_tb(error.__traceback__)
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if (
            isinstance(owner, nn.Module)
            and not isinstance(owner, StepModule)
            and not str(type(owner).__module__).startswith("torch.")
        ):
            module = type(owner).__name__
    # export raises far from the user's code for data-dependent control flow, and quotes the line in its message
    quoted = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(\S.*)', str(error))
    lines = [f"{Path(f).name}:{n}: {text}" for f, n, text in quoted if not f.startswith(OWN)]
    return Where(module, _user_frame(stack) or (lines[-1] if lines else ""))


# Errors that Python itself raises, independent of tensors.
_OF_PYTHON = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError)


def untraceable(error: Exception) -> CompileError:
    """Return an error that says why a trace failed, and what to do, for the one that ended it."""
    where = place_of_error(error)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kind = type(error).__name__
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException") or "data-dependent" in reason.lower():
        reason = "control flow depends on the values of a tensor, which a compiled program cannot follow"
        fix = "use torch.where (or a mask) instead of `if`, `.item()` or `nonzero` on tensor values"
    elif "is mutated in the forward method" in reason:  # a plain tensor attribute
        name = reason.partition("Constant ")[2].partition(" ")[0].removeprefix("model.")
        return CompileError("QN110", f"the forward pass changes the tensor {name!r}; a program would not", where=where)
    elif "Unsupported input type" in reason:
        kind = reason.partition("<class '")[2].partition("'>")[0].rpartition(".")[2]
        reason = f"the batch holds an object of the class {kind}, of whose content nothing is known"
        return CompileError("QN102", reason, fix="make it a dataclass or a NamedTuple, or pass a dict")
    elif (kernel := raw_kernel(error)) is not None:
        reason, fix = kernel
    elif "_ctc_loss" in reason:
        reason = "targets of ctc_loss one behind the other: where those of a row begin depends on values of the lengths"
        fix = "padded targets [rows, longest], as torch.nn.utils.rnn.pad_sequence(targets, batch_first=True) makes them"
    elif "unhashable type: non-nested SymInt" in reason:
        reason = "a key or an argument of functools.lru_cache is a size that varies, such as the number of rows"
        fix = "use sizes of the module or of the other dims as keys, or call the function's __wrapped__"
    elif not isinstance(error, _OF_PYTHON) and (layout := _layout(error)):
        reason = f"{layout} tensors have operators that a trace does not have: {reason[:200]}"
        fix = "compute with plain tensors: .to_dense()" if layout == "sparse" else "pad to plain tensors, and mask"
    elif _packed(error):
        reason = "packed sequences: how many rows each position has depends on the values of the lengths"
        fix = "run the layer on the padded batch, and read (or keep for the loss) what is inside of each row's length"
    elif fixes_the_batch(error):
        reason = "the batch size is fixed by the model's code, so it cannot run on another number of rows"
        fix = "use x.shape[0] (or -1) where len(x) or a literal batch size is used"
    else:
        reason, fix = f"{kind}: {reason[:300]}", ""
    return CompileError("QN101", reason, where=where, fix=fix)


def fixes_the_batch(error: Exception) -> bool:
    """Return whether an error is about a number of rows that the model's code fixes."""
    text = str(error)
    signs = ("specialized", "Constraints violated", "Expected op to be")  # the last one is of a bound of the rows
    return ROWS in text and ("ConstraintViolation" in type(error).__name__ or any(sign in text for sign in signs))


def _layout(error: Exception) -> str:
    """Return "sparse" or "nested" if the code that failed has such tensors, else ""."""
    frames = traceback.walk_tb(error.__traceback__)
    leaves = [x for frame, _ in frames for value in list(frame.f_locals.values()) for x in _tensors_of(value)]
    if any(x.is_nested for x in leaves) or "nested" in str(error):
        return "nested"
    return "sparse" if any(x.layout is not torch.strided for x in leaves) or "sparse" in str(error) else ""


def _tensors_of(value: Any) -> list[Tensor]:
    plain = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in plain if isinstance(x, Tensor)]


def _packed(error: Exception) -> bool:
    """Return whether the code that failed has a packed sequence."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(x, nn.utils.rnn.PackedSequence) for frame, _ in frames for x in frame.f_locals.values())
