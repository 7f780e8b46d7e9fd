"""What torch says while it traces: whole graphs, where it gives up. An error of this package says what matters."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from ..compat.torch import without_printed_graphs

_OF_CALLS = (FutureWarning, DeprecationWarning)  # of how torch calls itself


@dataclass(frozen=True)
class _Others(logging.Filter):
    """Lets records of other threads pass."""

    thread: int

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread


@contextlib.contextmanager
def without_messages_of_torch() -> Iterator[None]:
    """While inside, this thread hears nothing of torch's loggers, of the graphs that torch.export prints, and of what
    is deprecated. A logger of torch that was set to tell more than warnings (``TORCH_LOGS``, ``set_logs``) still tells
    everything. What the model itself prints, logs or warns of is not touched.
    """
    held = _Others(threading.get_ident())
    known = list(logging.root.manager.loggerDict.items())
    loggers = [x for name, x in known if isinstance(x, logging.Logger) and _usual(name, x)]
    with warnings.catch_warnings(), without_printed_graphs():
        for kind in _OF_CALLS:
            warnings.simplefilter("ignore", kind)
        for logger in loggers:
            logger.addFilter(held)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(held)


def _usual(name: str, logger: logging.Logger) -> bool:
    """Whether this is one of torch's, set as torch sets it."""
    return name.partition(".")[0] == "torch" and logger.getEffectiveLevel() >= logging.WARNING
