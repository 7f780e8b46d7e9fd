"""``quintnet convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.formats.format import Format
from ..core.progress import working
from .answer import Answer
from .inputs.options import Json


def convert(
    source: Annotated[Path, typer.Argument(help="a folder: a checkpoint of any of the formats", show_default=False)],
    destination: Annotated[Path, typer.Argument(help="a new folder", show_default=False)],
    to: Annotated[
        Format,
        typer.Option(
            help="quintnet: program.load; dcp: torch.distributed.checkpoint; safetensors: from_pretrained",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(help="which checkpoint of a folder of several; else the number that what is written gets"),
    ] = None,
    model_key: Annotated[
        str | None, typer.Option(help="where a dcp folder has the model, such as app.model; empty: at the top")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="names that begin with OLD begin with NEW; can be repeated"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json to put beside safetensors, or a folder that has it; for Megatron's names"),
    ] = None,
    json: Json = False,
) -> Answer:
    """Write a checkpoint in another format: model, optimizer, step.

    The whole checkpoint is held in memory.

    Exit code: 0, 2 usage, 7 the source cannot be read or the destination cannot be written.

    Example: quintnet convert runs/a runs/a_dcp --to dcp

    Example: quintnet convert outputs/checkpoint/step-1000 runs/b --to quintnet

    Example: quintnet convert runs/a llama --to safetensors --config config.json
    """
    from ..checkpoint.formats.convert import Choices
    from ..checkpoint.formats.convert import convert as converted

    pairs = []
    for option in rename or ():
        old, equals, new = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option!r} is not OLD=NEW", param_hint="--rename")
        pairs.append((old, new))
    with working("converting"):
        return Answer.from_report(converted(source, destination, to, Choices(step, model_key, tuple(pairs), config)))
