"""All verbs of the command line."""

from __future__ import annotations

import typer

from .answer import verb
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
def quintnet() -> None:
    """Train a plain nn.Module on any number of GPUs."""


def main() -> None:
    """Run the command line; errors are a few lines on stderr and an exit code, see :mod:`.answer`."""
    app()
