"""Silence torch while it traces: it prints whole graphs when it fails, and errors of this package say what matters."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from ..compat.torch import without_printed_graphs

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
