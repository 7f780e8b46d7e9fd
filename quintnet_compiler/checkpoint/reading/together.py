"""Errors of one rank, raised on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ...core.errors import CheckpointError, QuintNetError
from ...weights.files import shown
from .open_files import Damaged, VanishedError

TellAll = Callable[[str], Sequence[str]]
T = TypeVar("T")
_VANISHED = "vanished"  # in the place of an error's id


def alone(text: str) -> tuple[str, ...]:
    """Tell all ranks a text, where this is the only one."""
    return (text,)


@contextlib.contextmanager
def raised_together(tell_all: TellAll, code: str) -> Iterator[None]:
    """Raise on every rank what the block raises on one.

    Args:
        tell_all: gives every rank's text to every rank.
        code: of errors of the system and of other libraries.

    Raises:
        VanishedError: if files of an open checkpoint were removed, or have other bytes now, and nothing else failed.
        CheckpointError: otherwise; that of the first rank that failed.
    """
    mine: Exception | None = None
    text = ""
    try:
        yield
    except (VanishedError, Damaged) as error:
        mine, text = error, f"{_VANISHED}\n\n{error}"
    except CheckpointError as error:
        mine, text = error, f"{error.code}\n{error.fix}\n{error.message}"
    except QuintNetError:
        raise
    except Exception as error:  # of the file system or of a library: what it says is all that is known
        mine, text = error, f"{code}\nsee the reason\n{type(error).__name__}: {shown(str(error))}"
    messages = tell_all(text)
    failures = [(rank, message.split("\n", 2)) for rank, message in enumerate(messages) if message]
    for rank, (its_code, fix, reason) in failures:
        if its_code != _VANISHED:
            where = f" (rank {rank})" if len(messages) > 1 else ""
            raise CheckpointError(its_code, reason + where, fix=fix) from mine
    for _, (_, _, reason) in failures:
        raise VanishedError(reason) from mine


def attempted(call: Callable[[], T]) -> Callable[[], T]:
    """Call now, and return what returns the result, or raises the error, when it is called."""
    try:
        result = call()
    except Exception as error:
        failure = error

        def raise_failure() -> T:
            raise failure

        return raise_failure
    return lambda: result
