"""All verbs of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from .answer import Volume, volume
from .verbs import Verbs

app = typer.Typer(cls=Verbs, add_completion=False, help="Train a plain nn.Module on any number of GPUs.")


@app.callback(no_args_is_help=True)
def quintnet(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="neither progress nor warnings")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say where an error was raised")] = False,
) -> None:
    """Train a plain nn.Module on any number of GPUs."""
    volume.set(Volume(quiet, verbose))


def main() -> None:
    """Run the command line; errors are a few lines on stderr and an exit code, see :mod:`.answer`."""
    app()
