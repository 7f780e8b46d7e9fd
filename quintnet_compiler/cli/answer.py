"""What a verb answers, and how: results on stdout, everything else on stderr, an exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol

import typer

from ..core import errors, progress
from ..core.errors import CheckpointError, QuintNetError, RunError
from ..core.files import print_text

USAGE, NO_PLAN, UNSUPPORTED, NOT_EQUAL, RANK_FAULT, CHECKPOINT, NOT_FINITE = 2, 3, 4, 5, 6, 7, 8
P = ParamSpec("P")


class Printable(Protocol):
    """An answer: ``str()`` for people, ``to_json()`` for programs."""

    def to_json(self) -> str: ...


@dataclass(frozen=True)
class Answer:
    """A verb's result: ``text`` for people, ``document`` (JSON) for programs, the exit code."""

    text: str
    document: str
    code: int = 0

    @classmethod
    def from_report(cls, report: Printable, code: int = 0) -> Answer:
        return cls(str(report), report.to_json(), code)


@dataclass(frozen=True)
class Volume:
    """The amount of output on stderr: ``quiet``: no progress or warnings; ``verbose``: tracebacks of errors."""

    quiet: bool = False
    verbose: bool = False


USUAL = Volume()
volume: ContextVar[Volume] = ContextVar("quintnet_volume", default=USUAL)  # of the verb that runs


def write_output(option: str, path: Path | None, write: Callable[[Path], object]) -> None:
    """Write what an option names, if it was given; errors of the system are raised as typer.BadParameter."""
    try:
        if path is not None:
            write(path)
    except OSError as error:
        text = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise typer.BadParameter(text, param_hint=option) from error


def exit_code(error: QuintNetError) -> int:
    """The exit code that an error ends the command with; docs/cli.md has the table."""
    if error.code == "QN212":
        return NO_PLAN
    if error.code.startswith("QN5"):
        return NOT_FINITE
    if isinstance(error, RunError):
        return RANK_FAULT
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    return UNSUPPORTED


def verb(function: Callable[P, Answer]) -> Callable[P, None]:
    """Return a command that prints what ``function`` answers; with ``--json`` stdout has only that document."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json"))
        try:
            with _aside() if as_json else contextlib.nullcontext(), _plain_warnings(volume.get().quiet):
                answer = function(*args, **kwargs)
            if text := answer.document if as_json else answer.text:
                write_output("stdout", Path("stdout"), lambda _: print_text(text.rstrip("\n")))
        except QuintNetError as error:
            if volume.get().verbose:
                traceback.print_exc()
            typer.echo(str(error), err=True)
            typer.echo(f"  more: quintnet explain {error.code}", err=True)
            raise _end(_document(error), exit_code(error), as_json) from None
        except typer.BadParameter as error:
            message = error.format_message()
            typer.echo(f"quintnet {function.__name__}: {message}", err=True)
            raise _end({"id": "usage", "message": message}, USAGE, as_json) from None
        raise typer.Exit(answer.code)

    return run


@contextlib.contextmanager
def _plain_warnings(quiet: bool) -> Iterator[None]:
    """QuintNet's warnings without the line of its own that raised them; ``quiet``: none at all, and no progress."""
    with warnings.catch_warnings(), progress.hushed(quiet):
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if category.__module__ == errors.__name__:
                typer.echo(f"warning: {message}", err=True)
            else:
                usual(message, category, *place, **options)

        warnings.showwarning = show
        if quiet:
            warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Send to stderr what models, libraries and started processes print meanwhile: it is no result."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _end(error: Mapping[str, str], code: int, as_json: bool) -> typer.Exit:
    if as_json:
        typer.echo(json.dumps({"error": dict(error)}, indent=2))
    return typer.Exit(code)


def _document(error: QuintNetError) -> dict[str, str]:
    return {"id": error.code, "message": error.message, "where": str(error.where or ""), "fix": error.fix}
