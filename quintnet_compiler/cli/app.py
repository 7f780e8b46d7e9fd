"""The verbs of the command line, each loaded when it runs: ``quintnet --help`` needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .answer import Volume, verb, volume

# the name of a verb (of its module, too, and of the function in it) -> a line of help
VERBS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "The best ways to train a model on a cluster, without any device.",
        "explain": "What a program does with a part of a model and what that costs; or what an error means.",
        "estimate": "Step time, memory per rank, communication and bubble of a plan, without any device.",
        "simulate": "A step of a compiled program, without any device: who does what when, and the memory it takes.",
        "measure": "Run training steps in a process for each rank, and say who did what when in the last one.",
        "passes": "The compiler's passes in order, and the program before and after one of them.",
        "dump": "Write all that runs as files, and a page to look at it: index.html, which needs no network.",
        "diff": "What differs between two plans, or two dumps: decisions, files, and lines of code.",
        "verify": "Compare all ranks of a compiled program with the model itself, in this process.",
        "convert": "Write a checkpoint in another format: ours, torch.distributed.checkpoint, safetensors.",
        "train": "Train a model as a file says, going on from the newest checkpoint if there is one.",
        "watch": "A page of a run while it goes on: loss, speed, memory, the measured step. There is no server.",
        "goodput": "Where the time of a run went, over all its starts.",
        "cache": "The compiled programs that are kept in a folder, and the removal of old ones.",
        "doctor": "What is here: versions, devices, interfaces, a compiler, and two processes that add numbers.",
        "calibrate": "Measure how long operators and collectives take on this machine.",
    }
)


class Verbs(TyperGroup):
    """Knows the names of verbs and a line of help each; imports the module of the one that runs.

    Contexts and commands are click's, of which newer versions of typer have a copy of their own.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, arguments = super().resolve_command(ctx, args)
        return name, command and loaded(str(name)), arguments


def loaded(name: str) -> Any:
    """The command of a verb, with its options."""
    app = typer.Typer(add_completion=False)
    app.command(name)(verb(getattr(importlib.import_module(f".{name}", __package__), name)))
    return typer.main.get_command(app)


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
