"""All verbs of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from .answer import Volume, verb, volume
from .calibrate import calibrate
from .diff import diff
from .doctor import doctor
from .dump import dump
from .estimate import estimate
from .explain import explain
from .measure import measure
from .plan import plan
from .simulate import simulate
from .train import train
from .verify import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train a plain nn.Module on any number of GPUs.")
for one in (plan, explain, estimate, simulate, measure, dump, diff, verify, train, doctor, calibrate):
    app.command()(verb(one))


@app.callback()
def quintnet(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="neither progress nor warnings")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say where an error was raised")] = False,
) -> None:
    """Train a plain nn.Module on any number of GPUs."""
    volume.set(Volume(quiet, verbose))


def main() -> None:
    """Run the command line; errors are a few lines on stderr and an exit code, see :mod:`.answer`."""
    app()
